"""Masking strategies: how rows are split into units, and the weights of these."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from zipfile import BadZipFile

import numpy as np
from torch import Tensor

from megahead.config.base import load_class
from megahead.config.masking import MaskingConfig
from megahead.data.indexed import Array
from megahead.data.samples import CounterRng, Purpose
from megahead.data.strategy import (
    EqualWeights,
    PairCounts,
    Strategy,
    TargetErrorCounts,
    TrainingText,
    WeightedIds,
    split_long_units,
)
from megahead.data.whole_words import WholeWords
from megahead.errors import ConfigError
from megahead.remote_files import local_file


@dataclass(frozen=True)
class Pmi(EqualWeights):
    """Units are collocations (after Levine et al. 2021, arXiv 2010.01825); other tokens are units of their own.

    Collocations are ordered pairs (a, b) that are neighbours far more often than by chance. A unit is extended as long
    as its last token and the next are one, up to `max_tokens` tokens.
    """

    codes: Array
    """int64, increasing: a * vocab_size + b."""

    vocab_size: int
    max_tokens: int

    @staticmethod
    def build(masking: MaskingConfig, text: TrainingText) -> Pmi:
        """Counts the bigrams of the text."""
        pairs, max_tokens = text.pair_counts(), masking.max_unit_length(text.config.data.sequence_length)
        return Pmi.from_pairs(pairs, masking.least_pmi, masking.least_count, max_tokens, text.special_ids())

    @staticmethod
    def from_pairs(
        pairs: PairCounts, min_pmi: float, min_count: int, max_tokens: int, excluded: Sequence[int] = ()
    ) -> Pmi:
        """Collocations are the pairs with at least `min_pmi` nats and `min_count` uses, without `excluded` ids."""
        a, b = pairs.pairs()
        selected = (pairs.pmi() >= min_pmi) & (pairs.counts >= min_count)
        selected &= ~np.isin(a, excluded) & ~np.isin(b, excluded)
        return Pmi(pairs.codes[selected], len(pairs.count_V), max_tokens)

    def is_collocation(self, a: Array, b: Array) -> Array:
        """bool, of the shape of `a` and `b`: whether each (a, b) is a collocation."""
        codes = a.astype(np.int64) * self.vocab_size + b
        if not len(self.codes):
            return np.zeros(codes.shape, bool)
        index = np.minimum(np.searchsorted(self.codes, codes), len(self.codes) - 1)
        result: Array = self.codes[index] == codes
        return result

    def starts(self, tokens_BT: Array, rng: CounterRng) -> Array:
        starts_BT = np.ones(tokens_BT.shape, bool)
        starts_BT[:, 1:] = ~self.is_collocation(tokens_BT[:, :-1], tokens_BT[:, 1:])
        return split_long_units(self.max_tokens, starts_BT)


class Frequency(WeightedIds):
    """Weights of ids: (count + 1)^-power, so that rare tokens are masked more often (after Zhang et al. 2023)."""

    @staticmethod
    def build(masking: MaskingConfig, text: TrainingText) -> Frequency:
        """From the token counts in the datasets' `.json` files."""
        return Frequency.from_counts(text.token_counts().tolist(), masking.frequency_power)

    @staticmethod
    def from_counts(token_counts: Sequence[int], power: float) -> Frequency:
        """From each id's count in the training text."""
        return Frequency((np.asarray(token_counts, np.float64) + 1) ** -power)


WEIGHT_FLOOR = 0.1
"""Added to all weights, so that an id that is always predicted is masked at times."""

PRIOR_TARGETS = 2
"""Prior of an id's error rate: this many targets, with the error rate of all ids together."""


@dataclass(frozen=True)
class Hardest(WeightedIds):
    """Weights of ids: WEIGHT_FLOOR plus their error rate; equal until errors have been counted.

    After adaptive masking by how well a model predicts each token (Edman, Fraser 2025, arXiv 2510.20475, "Mask and You
    Shall Receive").
    """

    target_error_counts: TargetErrorCounts
    _cache: list[tuple[Tensor, Hardest]] = field(default_factory=list)
    """The latest counts and the strategy made of them: one pass over the vocabulary per period."""

    @staticmethod
    def build(masking: MaskingConfig, text: TrainingText) -> Hardest:
        """From the run's error counts. Requires the token counts that the training-free head needs."""
        text.token_counts()
        assert text.target_error_counts is not None
        return Hardest(np.ones(text.vocab_size), text.target_error_counts)

    def at(self, step: int) -> Hardest:
        counts_V2 = self.target_error_counts.at(step)
        if not self._cache or self._cache[0][0] is not counts_V2:
            errors_V, targets_V = counts_V2.numpy().astype(np.float64).T
            error_rate = (errors_V.sum() + PRIOR_TARGETS) / (targets_V.sum() + PRIOR_TARGETS)
            weight_V = WEIGHT_FLOOR + (errors_V + PRIOR_TARGETS * error_rate) / (targets_V + PRIOR_TARGETS)
            self._cache[:] = [(counts_V2, Hardest(weight_V[: len(self.weight_V)], self.target_error_counts))]
        return self._cache[0][1]


class Informative(WeightedIds):
    """Weights of ids: WEIGHT_FLOOR plus the mean positive PMI with a neighbour, over both neighbours of all uses.
    Pairs that occur less than `least_count` times count as 0.

    After InforMask (Sadeq, Xu, McAuley 2022, arXiv 2210.11771), which prefers tokens with a high PMI with the rest of
    their row. Here an id has one weight, so that how often it is selected depends on the id alone, and the
    training-free head remains exact.
    """

    @staticmethod
    def build(masking: MaskingConfig, text: TrainingText) -> Informative:
        """Counts the bigrams of the text. Requires the token counts that the training-free head needs."""
        text.token_counts()
        return Informative.from_pairs(text.pair_counts(), masking.least_count, text.special_ids())

    @staticmethod
    def from_pairs(pairs: PairCounts, least_count: int, excluded: list[int]) -> Informative:
        """From bigram counts; pairs with `excluded` ids count as 0."""
        a, b = pairs.pairs()
        is_counted = (pairs.counts >= least_count) & ~np.isin(a, excluded) & ~np.isin(b, excluded)
        information = np.where(is_counted, pairs.counts * np.maximum(pairs.pmi(), 0.0), 0.0)
        size = len(pairs.count_V)
        sums_V = np.bincount(a, information, size) + np.bincount(b, information, size)
        return Informative(WEIGHT_FLOOR + sums_V / np.maximum(2 * pairs.count_V, 1))


@dataclass(frozen=True)
class Spans(EqualWeights):
    """Spans with SpanBERT's distribution of lengths (Joshi et al. 2020, arXiv 1907.10529), a geometric one truncated at
    `max_tokens`: P(l) is proportional to stop (1 - stop)^(l - 1), mean 3.8 for 0.2 and 10. Lengths are in tokens; the
    paper's are in words.

    The whole row is divided into such spans, so that selected ones have these lengths and never overlap.
    """

    stop: float
    max_tokens: int

    @staticmethod
    def build(masking: MaskingConfig, text: TrainingText) -> Spans:
        """From the settings alone."""
        return Spans(masking.span_stop, masking.max_unit_length(text.config.data.sequence_length))

    def starts(self, tokens_BT: Array, rng: CounterRng) -> Array:
        rows, length = tokens_BT.shape
        draw_BT = rng.uniform(Purpose.SPAN_LENGTHS, length)
        with np.errstate(divide="ignore"):
            log_continue = np.log1p(-self.stop)
        max_cdf = -np.expm1(log_continue * self.max_tokens)
        lengths_BT = np.ceil(np.log1p(-draw_BT * max_cdf) / log_continue).astype(np.int64)
        ends_BT = lengths_BT.clip(1, self.max_tokens).cumsum(1)
        starts_BT = np.zeros((rows, length), bool)
        starts_BT[:, 0] = True
        row_B, span_B = np.nonzero(ends_BT < length)
        starts_BT[row_B, ends_BT[row_B, span_B]] = True
        return starts_BT


class Uniform(EqualWeights):
    """Single tokens with equal weights (BERT)."""

    @staticmethod
    def build(masking: MaskingConfig, text: TrainingText) -> Uniform:
        return Uniform()


class Weights(WeightedIds):
    """Weights of ids from a `.npy` file with a number above 0 for each id; by parts of speech, for example."""

    @staticmethod
    def build(masking: MaskingConfig, text: TrainingText) -> Weights:
        """From the file `data.id_weights`. Requires the token counts that the training-free head needs."""
        text.token_counts()
        return Weights.read(str(text.config.data.id_weights), text.vocab_size)

    @staticmethod
    def read(path: str, vocab_size: int) -> Weights:
        """Reads a file, downloaded first if `path` is a URL. Ids that only the model has, beyond the file's, have the
        weight 1. ConfigError for an invalid file."""
        try:
            weight_V = np.load(local_file(path), allow_pickle=False)
        except (OSError, ValueError, EOFError, BadZipFile) as error:
            raise ConfigError("data.id_weights", "name a file of numpy", got=f"{path} ({error})") from None
        if not isinstance(weight_V, np.ndarray):
            raise ConfigError("data.id_weights", "name a file of numpy", got=f"{path}, which has several arrays")
        if weight_V.ndim != 1 or weight_V.dtype.kind not in "fiu" or not 0 < len(weight_V) <= vocab_size:
            rule = f"hold a number for each of at most model.vocab_size ({vocab_size}) ids"
            raise ConfigError("data.id_weights", rule, got=f"{weight_V.dtype} {weight_V.shape}")
        weight_V = weight_V.astype(np.float64)
        if len(invalid := np.flatnonzero(~(np.isfinite(weight_V) & (weight_V > 0)))):
            id_ = int(invalid[0])
            raise ConfigError("data.id_weights", "hold numbers above 0", got=f"{weight_V[id_]:g} for id {id_}")
        return Weights(np.pad(weight_V, (0, vocab_size - len(weight_V)), constant_values=1.0))


STRATEGIES: Mapping[str, Callable[[MaskingConfig, TrainingText], Strategy]] = {
    "uniform": Uniform.build,
    "whole_word": WholeWords.build,
    "span": Spans.build,
    "frequency": Frequency.build,
    "informative": Informative.build,
    "hardest": Hardest.build,
    "pmi": Pmi.build,
    "weights": Weights.build,
}
"""By `masking.strategy`."""


def build_strategy(masking: MaskingConfig, text: TrainingText) -> Strategy:
    """Builds `masking.strategy`: one of STRATEGIES, or a custom class; ConfigError as of `custom_strategy`."""
    if masking.strategy_is_custom():
        strategy: Strategy = custom_strategy(masking.strategy).build(masking, text)
        return strategy
    return STRATEGIES[masking.strategy](masking, text)


def custom_strategy(name: str) -> Any:
    """Imports a custom strategy class; ConfigError if that fails or the class lacks a method."""
    strategy, methods = load_class("masking.strategy", name), ("build", "at", "starts", "weights")
    if missing := [method for method in methods if not callable(getattr(strategy, method, None))]:
        rule = f"name a class with {', '.join(methods)}"
        raise ConfigError("masking.strategy", rule, got=f"{name!r} without {missing[0]}", hint="see docs/extending.md")
    return strategy
