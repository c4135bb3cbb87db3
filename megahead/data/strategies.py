"""Masking strategies: how a row is cut into units, and how likely each is selected."""

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
    ErrorCounts,
    PairCounts,
    Strategy,
    TrainingText,
    WeightedIds,
    no_longer_than,
)
from megahead.data.whole_words import WholeWords
from megahead.errors import ConfigError
from megahead.remote_files import local_file


@dataclass(frozen=True)
class Pmi(EqualWeights):
    """Collocations together (after Levine et al. 2021, arXiv 2010.01825), other tokens alone.

    Collocations are ordered pairs (a, b) that are neighbours far more often than by chance. A unit is extended as long
    as its last token and the next are one, up to `max_tokens` tokens.
    """

    codes: Array
    """int64, increasing: a * vocab_size + b."""

    vocab_size: int
    max_tokens: int

    @staticmethod
    def build(masking: MaskingConfig, text: TrainingText) -> Pmi:
        """Counts neighbours in the text."""
        pairs, longest = text.pair_counts(), masking.max_unit_length(text.config.data.sequence_length)
        return Pmi.from_pairs(pairs, masking.least_pmi, masking.least_count, longest, text.special_ids())

    @staticmethod
    def from_pairs(
        pairs: PairCounts, min_pmi: float, min_count: int, max_tokens: int, excluded: Sequence[int] = ()
    ) -> Pmi:
        """With the pairs of at least so much PMI (nats) and so many occurrences, without `excluded` ids."""
        a, b = pairs.pairs()
        kept = (pairs.pmi() >= min_pmi) & (pairs.counts >= min_count)
        kept &= ~np.isin(a, excluded) & ~np.isin(b, excluded)
        return Pmi(pairs.codes[kept], len(pairs.count_V), max_tokens)

    def contain(self, a: Array, b: Array) -> Array:
        """bool, of the shape of both: whether (a, b) is a collocation."""
        wanted = a.astype(np.int64) * self.vocab_size + b
        if not len(self.codes):
            return np.zeros(wanted.shape, bool)
        places = np.minimum(np.searchsorted(self.codes, wanted), len(self.codes) - 1)
        found: Array = self.codes[places] == wanted
        return found

    def starts(self, tokens_BT: Array, rng: CounterRng) -> Array:
        starts_BT = np.ones(tokens_BT.shape, bool)
        starts_BT[:, 1:] = ~self.contain(tokens_BT[:, :-1], tokens_BT[:, 1:])
        return no_longer_than(self.max_tokens, starts_BT)


class Frequency(WeightedIds):
    """Rare tokens more often, in proportion to (count + 1)^-power (after Zhang et al. 2023)."""

    @staticmethod
    def build(masking: MaskingConfig, text: TrainingText) -> Frequency:
        """By the counts that preprocessing has put beside the datasets."""
        return Frequency.from_counts(text.token_counts().tolist(), masking.frequency_power)

    @staticmethod
    def from_counts(token_counts: Sequence[int], power: float) -> Frequency:
        """From each id's count in the training text."""
        return Frequency((np.asarray(token_counts, np.float64) + 1) ** -power)


WEIGHT_FLOOR = 0.1
"""Added to all shares of misses, so that an id that is always predicted is masked at times."""

PRIOR_TARGETS = 2
"""Targets that every id begins with, missed as often as all are together."""


@dataclass(frozen=True)
class Hardest(WeightedIds):
    """Ids in proportion to WEIGHT_FLOOR plus the share of times that they were missed; all alike until that is known.

    After adaptive masking by how well a model predicts each token (Edman, Fraser 2025, arXiv 2510.20475, "Mask and You
    Shall Receive").
    """

    error_counts: ErrorCounts
    _latest: list[tuple[Tensor, Hardest]] = field(default_factory=list)
    """The counts that were last asked for, and what became of them: one pass over the vocabulary a period."""

    @staticmethod
    def build(masking: MaskingConfig, text: TrainingText) -> Hardest:
        """By what the run counts; the training-free head will need the text's token counts."""
        text.token_counts()
        assert text.error_counts is not None
        return Hardest(np.ones(text.vocab_size), text.error_counts)

    def at(self, step: int) -> Hardest:
        """With the weights of a step."""
        counts_V2 = self.error_counts.at(step)
        if not self._latest or self._latest[0][0] is not counts_V2:
            misses_V, targets_V = counts_V2.numpy().astype(np.float64).T
            share = (misses_V.sum() + PRIOR_TARGETS) / (targets_V.sum() + PRIOR_TARGETS)
            weight_V = WEIGHT_FLOOR + (misses_V + PRIOR_TARGETS * share) / (targets_V + PRIOR_TARGETS)
            self._latest[:] = [(counts_V2, Hardest(weight_V[: len(self.weight_V)], self.error_counts))]
        return self._latest[0][1]


class Informative(WeightedIds):
    """Weights of ids: WEIGHT_FLOOR plus the mean positive PMI with a neighbour, over both neighbours of all uses.
    Pairs that occur less than `least_count` times count as 0.

    After InforMask (Sadeq, Xu, McAuley 2022, arXiv 2210.11771), which prefers tokens with a high PMI with the rest of
    their row. Here an id has one weight, so that how often it is selected depends on the id alone, and the
    training-free head remains exact.
    """

    @staticmethod
    def build(masking: MaskingConfig, text: TrainingText) -> Informative:
        """Counts neighbours in the text, whose token counts the training-free head will need."""
        text.token_counts()
        return Informative.from_pairs(text.pair_counts(), masking.least_count, text.special_ids())

    @staticmethod
    def from_pairs(pairs: PairCounts, least_count: int, excluded: list[int]) -> Informative:
        """From the counts of neighbours; `excluded` ids inform of nothing."""
        a, b = pairs.pairs()
        kept = (pairs.counts >= least_count) & ~np.isin(a, excluded) & ~np.isin(b, excluded)
        information = np.where(kept, pairs.counts * np.maximum(pairs.pmi(), 0.0), 0.0)
        size = len(pairs.count_V)
        sums_V = np.bincount(a, information, size) + np.bincount(b, information, size)
        return Informative(WEIGHT_FLOOR + sums_V / np.maximum(2 * pairs.count_V, 1))


@dataclass(frozen=True)
class Spans(EqualWeights):
    """Spans whose lengths follow SpanBERT's distribution (Joshi et al. 2020, arXiv 1907.10529), geometric of what is at
    most `max_tokens`: P(l) is in proportion to stop (1 - stop)^(l - 1), mean 3.8 for 0.2 and 10. Lengths are in tokens;
    the paper's are in words.

    The whole row is divided into such spans, so that those that are chosen have these lengths and never overlap.
    """

    stop: float
    max_tokens: int

    @staticmethod
    def build(masking: MaskingConfig, text: TrainingText) -> Spans:
        """By the settings alone."""
        return Spans(masking.span_stop, masking.max_unit_length(text.config.data.sequence_length))

    def starts(self, tokens_BT: Array, rng: CounterRng) -> Array:
        rows, length = tokens_BT.shape
        draw_BT = rng.uniform(Purpose.SPAN_LENGTHS, length)
        with np.errstate(divide="ignore"):
            tail = np.log1p(-self.stop)
        reached = -np.expm1(tail * self.max_tokens)  # the share of lengths up to the longest
        lengths_BT = np.ceil(np.log1p(-draw_BT * reached) / tail).astype(np.int64)
        ends_BT = lengths_BT.clip(1, self.max_tokens).cumsum(1)
        starts_BT = np.zeros((rows, length), bool)
        starts_BT[:, 0] = True
        row_B, span_B = np.nonzero(ends_BT < length)
        starts_BT[row_B, ends_BT[row_B, span_B]] = True
        return starts_BT


class Uniform(EqualWeights):
    """Single tokens, all with the same chance (BERT)."""

    @staticmethod
    def build(masking: MaskingConfig, text: TrainingText) -> Uniform:
        """Needs neither."""
        return Uniform()


class Weights(WeightedIds):
    """Tokens in proportion to weights of their ids that a file gives: those of parts of speech, say, or any of one's
    own. A `.npy` of numpy, a number above 0 for each id."""

    @staticmethod
    def build(masking: MaskingConfig, text: TrainingText) -> Weights:
        """By the file that `data.id_weights` names; the training-free head will need the text's token counts."""
        text.token_counts()
        return Weights.read(str(text.config.data.id_weights), text.vocab_size)

    @staticmethod
    def read(path: str, vocab_size: int) -> Weights:
        """ConfigError unless the file has weights of so many ids; 1 of ids behind them, which only the model has. A
        URL's is fetched first."""
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
        if len(wrong := np.flatnonzero(~(np.isfinite(weight_V) & (weight_V > 0)))):
            id_ = int(wrong[0])
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
    """By `masking.strategy`, which may name a class of one's own with the same `build`; as `custom_strategy`."""
    if masking.strategy_is_custom():
        built: Strategy = custom_strategy(masking.strategy).build(masking, text)
        return built
    return STRATEGIES[masking.strategy](masking, text)


def custom_strategy(name: str) -> Any:
    """The class of one's own; ConfigError where it cannot be imported or is none."""
    kind, methods = load_class("masking.strategy", name), ("build", "at", "starts", "weights")
    if lacking := [method for method in methods if not callable(getattr(kind, method, None))]:
        rule = f"name a class with {', '.join(methods)}"
        raise ConfigError("masking.strategy", rule, got=f"{name!r} without {lacking[0]}", hint="see docs/extending.md")
    return kind
