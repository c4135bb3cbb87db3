"""Single tokens, more often those that say much about what stands beside them.

After InforMask (Sadeq, Xu, McAuley 2022, arXiv 2210.11771), which prefers tokens with a high pointwise mutual
information (PMI) with the rest of their row. Here an id has one weight, its mean PMI with its neighbours in the
training text: so that how often an id is selected depends on the id alone, and the training-free head remains exact.
"""

from __future__ import annotations

import numpy as np

from megahead.config import MaskingConfig
from megahead.data.strategies.pair_counts import PairCounts
from megahead.data.strategies.strategy import WeighedIds
from megahead.data.strategies.training_text import TrainingText

FLOOR = 0.1
"""Nats added to all weights, so that each id is selected at times."""


class Informative(WeighedIds):
    """Tokens in proportion to FLOOR plus the positive PMI with a neighbour, on average over both neighbours of all
    their occurrences; pairs that occur less than `least_count` times count as 0."""

    @staticmethod
    def made(masking: MaskingConfig, text: TrainingText) -> Informative:
        """Counts neighbours in the text, whose token counts the training-free head will need."""
        text.token_counts()
        return Informative.of(text.pair_counts(), masking.least_count, text.special_ids())

    @staticmethod
    def of(pairs: PairCounts, least_count: int, excluded: list[int]) -> Informative:
        """From the counts of neighbours; `excluded` ids inform of nothing."""
        a, b = pairs.pairs()
        kept = (pairs.counts >= least_count) & ~np.isin(a, excluded) & ~np.isin(b, excluded)
        information = np.where(kept, pairs.counts * np.maximum(pairs.pmi(), 0.0), 0.0)
        size = len(pairs.count_V)
        sums_V = np.bincount(a, information, size) + np.bincount(b, information, size)
        return Informative(FLOOR + sums_V / np.maximum(2 * pairs.count_V, 1))
