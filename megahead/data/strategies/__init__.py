"""Masking strategies: how a row is cut into units, and how likely each is selected; each a file, and a line here."""

from collections.abc import Callable, Mapping

from megahead.config import MaskingConfig
from megahead.data.strategies.collocations import Collocations, Pmi
from megahead.data.strategies.frequency import Frequency
from megahead.data.strategies.hardest import Hardest
from megahead.data.strategies.informative import Informative
from megahead.data.strategies.pair_counts import PairCounts
from megahead.data.strategies.spans import Spans
from megahead.data.strategies.strategy import Strategy, WeighedIds
from megahead.data.strategies.training_text import TrainingText
from megahead.data.strategies.uniform import Uniform
from megahead.data.strategies.weights import Weights
from megahead.data.strategies.whole_words import WholeWords

STRATEGIES: Mapping[str, Callable[[MaskingConfig, TrainingText], Strategy]] = {
    "uniform": Uniform.made,
    "whole_word": WholeWords.made,
    "span": Spans.made,
    "frequency": Frequency.made,
    "informative": Informative.made,
    "hardest": Hardest.made,
    "pmi": Pmi.made,
    "weights": Weights.made,
}
"""By `masking.strategy`."""

__all__ = [
    "STRATEGIES",
    "Collocations",
    "Frequency",
    "Hardest",
    "Informative",
    "PairCounts",
    "Pmi",
    "Spans",
    "Strategy",
    "TrainingText",
    "Uniform",
    "WeighedIds",
    "Weights",
    "WholeWords",
]
