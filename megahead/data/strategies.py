"""Masking strategies: the units of tokens that are masked together, and their weights."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
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
    Strategy,
    TargetErrorCounts,
    TrainingText,
    WeightedIds,
    split_long_units,
)
from megahead.errors import ConfigError
from megahead.remote_files import local_file


@dataclass(frozen=True)
class Pmi(EqualWeights):
    """Units are collocations (after Levine et al. 2021, arXiv 2010.01825); other tokens are units of their own.

    Collocations are ordered pairs (a, b) that are neighbours far more often than by chance. A unit is extended as long
    as its last token and the next are such a pair, up to `max_tokens` tokens.
    """

    codes: Array
    """int64, increasing: a * vocab_size + b."""

    vocab_size: int
    max_tokens: int

    @staticmethod
    def build(masking: MaskingConfig, text: TrainingText) -> Pmi:
        """Counts the bigrams of the text. Collocations are the pairs with at least `least_pmi` nats and `least_count`
        occurrences, without special ids."""
        pairs = text.pair_counts()
        selected = (pairs.pmi() >= masking.least_pmi) & pairs.selected(masking.least_count, text.special_ids())
        max_tokens = masking.max_unit_length(text.config.data.sequence_length)
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
        return Frequency((text.token_counts() + 1.0) ** -masking.frequency_power)


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
    """The latest counts and the strategy made of them: one pass over the vocabulary per update of the counts."""

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
    """Weights of ids: WEIGHT_FLOOR plus the mean positive PMI with a neighbour, over both neighbours of all
    occurrences. Pairs that occur less than `least_count` times count as 0.

    After InforMask (Sadeq, Xu, McAuley 2022, arXiv 2210.11771), which prefers tokens with a high PMI with the rest of
    their row. Here an id has one weight, so that how often it is selected depends on the id alone, and the
    training-free head remains exact.
    """

    @staticmethod
    def build(masking: MaskingConfig, text: TrainingText) -> Informative:
        """Counts the bigrams of the text; pairs with special ids count as 0. Requires the token counts that the
        training-free head needs."""
        text.token_counts()
        pairs = text.pair_counts()
        a, b = pairs.pairs()
        is_counted = pairs.selected(masking.least_count, text.special_ids())
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


# BERT's whole word masking, defined alike for all tokenizers. A word is a sequence of digits and of letters of one
# script, with their combining marks. Leading spaces and the tokenizer's prefix symbols do not matter. Every other token
# (punctuation, symbols, spaces) is a unit of its own, and so is every token of a script that is written without spaces.
# Byte-level tokens of one character, with the combining marks that follow it, are always masked together.
# M tokens of all rows, K bytes of these tokens, C characters, V vocabulary.

_SEPARATOR, _WITHOUT_SPACES, _MARK, _DIGIT, _LETTER = range(5)
"""Kinds of characters (_MARK: combining marks). Each script has its own number, from _LETTER on."""

_ROW_SEPARATOR = b"\0\0\0"
"""Three bytes, so that decoding an incomplete last character of a row reads nothing of the next row."""

_SCRIPTS_WITHOUT_SPACES = (
    *("CJK", "HIRAGANA", "KATAKANA", "HALFWIDTH", "BOPOMOFO", "YI"),
    *("THAI", "LAO", "KHMER", "MYANMAR", "TAI", "NEW", "JAVANESE", "BALINESE"),
)
"""The first word of their letters' Unicode names (NEW stands for NEW TAI LUE)."""


@dataclass(frozen=True)
class WholeWords(EqualWeights):
    """A word is a unit. A word longer than `max_tokens` is split into units of at most that many tokens."""

    bytes_: Array
    """uint8: the bytes of all ids and of the row separator, concatenated."""

    ends_V: Array
    """int64: the end of each id's bytes in `bytes_`."""

    max_tokens: int

    @staticmethod
    def build(masking: MaskingConfig, text: TrainingText) -> WholeWords:
        """From the settings and the tokenizer of the run."""
        return WholeWords.from_bytes(text.bytes_of_ids(), masking.max_unit_length(text.config.data.sequence_length))

    @staticmethod
    def from_bytes(bytes_of_ids: Sequence[bytes | None], max_tokens: int) -> WholeWords:
        """From the bytes of each id, including a leading space. None marks a special token, which is in no word."""
        texts = [*(text or b"\0" for text in bytes_of_ids), _ROW_SEPARATOR]
        ends_V = np.cumsum([len(text) for text in texts])
        return WholeWords(np.frombuffer(b"".join(texts), np.uint8), ends_V, max_tokens)

    def starts(self, tokens_BT: Array, rng: CounterRng) -> Array:
        padded_BT = np.pad(tokens_BT, ((0, 0), (1, 0)), constant_values=len(self.ends_V) - 1)
        continues_word_M, continues_character_M = self._continuations(padded_BT.reshape(-1))
        starts_BT = ~continues_word_M.reshape(padded_BT.shape)[:, 1:]
        return split_long_units(self.max_tokens, starts_BT, continues_character_M.reshape(padded_BT.shape)[:, 1:])

    def _continuations(self, tokens_M: Array) -> tuple[Array, Array]:
        """bool [M] each: whether a token continues the word of the one before; whether it continues its character."""
        char_M, last_char_M, kind_C, base_C = self._characters(tokens_M)
        previous_M = np.roll(last_char_M, 1)
        continues_character_M = (char_M == previous_M) | (kind_C[char_M] == _MARK)
        kinds_2M = kind_C[base_C[char_M]], kind_C[base_C[previous_M]]
        min_M, max_M = np.minimum(*kinds_2M), np.maximum(*kinds_2M)
        is_same_word_M = (min_M == _DIGIT) | ((min_M >= _LETTER) & (min_M == max_M))
        return continues_character_M | is_same_word_M, continues_character_M

    def _characters(self, tokens_M: Array) -> tuple[Array, Array, Array, Array]:
        """int64 [M] twice: the index of the character with each token's first byte, and with its last byte. [C] twice:
        the kind of each character, and the index of its base character (itself unless it is a mark)."""
        size_M = np.diff(self.ends_V, prepend=0)[tokens_M]
        last_M = size_M.cumsum() - 1
        byte_K = self.bytes_[np.repeat(self.ends_V[tokens_M] - 1 - last_M, size_M) + np.arange(size_M.sum())]
        is_lead_K = (byte_K & 0xC0) != 0x80
        is_lead_K[:1] = True
        char_K = is_lead_K.cumsum() - 1
        kind_C = _character_kinds()[_code_points(byte_K, np.flatnonzero(is_lead_K))]
        base_C = np.maximum.accumulate(np.where(kind_C == _MARK, 0, np.arange(len(kind_C))))
        return char_K[last_M + 1 - size_M], char_K[last_M], kind_C, base_C


def _code_points(byte_K: Array, lead_C: Array) -> Array:
    """int64 [C]: code points of the characters whose first bytes are at `lead_C`; arbitrary for incomplete ones."""
    padded_K = np.pad(byte_K, (0, 3)).astype(np.int64)
    code_C = padded_K[lead_C]
    length_C = 1 + sum((code_C >= first).astype(np.int64) for first in (0xC0, 0xE0, 0xF0))
    code_C = np.where(length_C > 1, code_C & (0x7F >> length_C), code_C)
    for offset in (1, 2, 3):
        code_C = np.where(length_C > offset, code_C << 6 | padded_K[lead_C + offset] & 0x3F, code_C)
    return np.minimum(code_C, 0x10FFFF)


@cache
def _character_kinds() -> Array:
    """int16 [0x110000]: the kind of each Unicode character; takes 0.3 s, once."""
    kind_by_script = dict.fromkeys(_SCRIPTS_WITHOUT_SPACES, _WITHOUT_SPACES)

    def kind(char: str) -> int:
        category = unicodedata.category(char)
        if category[0] == "M" or category in ("Lm", "Cf"):  # modifier letters and format characters, too
            return _MARK
        if category[0] == "N":
            return _DIGIT
        if category[0] != "L":
            return _SEPARATOR
        return kind_by_script.setdefault(unicodedata.name(char, "?").split()[0], _LETTER + len(kind_by_script))

    return np.array([kind(chr(code)) for code in range(0x110000)], np.int16)


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
