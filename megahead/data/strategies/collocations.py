"""Neighbours that belong together are masked together (after Levine et al. 2021, arXiv 2010.01825)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megahead.config import MaskingConfig
from megahead.data.counter_rng import CounterRng
from megahead.data.strategies.pair_counts import PairCounts
from megahead.data.strategies.strategy import AllAlike, no_longer_than
from megahead.data.strategies.training_text import TrainingText

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Collocations:
    """A set of ordered pairs (a, b) that are neighbours far more often than by chance."""

    codes: Array
    """int64, increasing: a * vocab_size + b."""

    vocab_size: int

    def contain(self, a: Array, b: Array) -> Array:
        """bool, of the shape of both: whether (a, b) is in the set."""
        wanted = a.astype(np.int64) * self.vocab_size + b
        if not len(self.codes):
            return np.zeros(wanted.shape, bool)
        places = np.minimum(np.searchsorted(self.codes, wanted), len(self.codes) - 1)
        found: Array = self.codes[places] == wanted
        return found

    @staticmethod
    def of(pairs: PairCounts, *, min_pmi: float, min_count: int, excluded: Sequence[int] = ()) -> Collocations:
        """Those of at least so much PMI (nats) and so many occurrences, without `excluded` ids."""
        a, b = pairs.pairs()
        kept = (pairs.pmi() >= min_pmi) & (pairs.counts >= min_count)
        kept &= ~np.isin(a, excluded) & ~np.isin(b, excluded)
        return Collocations(pairs.codes[kept], len(pairs.count_V))


@dataclass(frozen=True)
class Pmi(AllAlike):
    """Collocations together, other tokens alone.

    A unit is extended as long as its last token and the next are a collocation, up to `max_tokens` tokens.
    """

    collocations: Collocations
    max_tokens: int

    @staticmethod
    def made(masking: MaskingConfig, text: TrainingText) -> Pmi:
        """Counts neighbours in the text."""
        pairs, excluded = text.pair_counts(), text.special_ids()
        found = Collocations.of(pairs, min_pmi=masking.least_pmi, min_count=masking.least_count, excluded=excluded)
        return Pmi(found, masking.longest_unit(text.config.data.sequence_length))

    def starts(self, tokens_BT: Array, noise: CounterRng) -> Array:
        starts_BT = np.ones(tokens_BT.shape, bool)
        starts_BT[:, 1:] = ~self.collocations.contain(tokens_BT[:, :-1], tokens_BT[:, 1:])
        return no_longer_than(self.max_tokens, starts_BT)
