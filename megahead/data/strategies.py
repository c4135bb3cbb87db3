"""Masking strategies: how a row is cut into units, and how likely each is selected."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import pairwise
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from megahead.config.base import load_named
from megahead.config.masking import MaskingConfig
from megahead.config.run import RunConfig
from megahead.data.indexed import IndexedDataset, open_array
from megahead.data.samples import CounterRng, Purpose
from megahead.data.vocabulary_map import bytes_of_ids
from megahead.distributed.group import Group
from megahead.errors import ConfigError

# How often tokens are neighbours in a text, and how much more often than by chance.
#
# Measured by pointwise mutual information, PMI(a, b) = log(p(ab) / (p(a) p(b))), in nats. V vocabulary, P pairs.


_CHUNK = 1 << 22  # tokens counted at once
MAX_TOKENS = 1 << 26
"""Tokens of each dataset that are counted, from its beginning: enough to find frequent pairs."""


@dataclass(frozen=True)
class PairCounts:
    """Ordered pairs (a, b) of neighbours, each once."""

    codes: Array
    """int64 [P], increasing: a * V + b."""

    counts: Array
    """int64 [P]."""

    count_V: Array
    """int64: of the single tokens."""

    @staticmethod
    def of(chunks: Iterable[Array], vocab_size: int) -> PairCounts:
        """Counts neighbouring tokens in `chunks`.

        About 0.3 s per million tokens; memory in proportion to the number of different pairs.
        """
        count_V = np.zeros(vocab_size, np.int64)
        codes, counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
        for chunk in chunks:
            tokens = chunk.astype(np.int64)
            count_V += np.bincount(tokens, minlength=vocab_size)
            some, how_often = np.unique(tokens[:-1] * vocab_size + tokens[1:], return_counts=True)
            codes, inverse = np.unique(np.concatenate([codes, some]), return_inverse=True)
            counts = np.bincount(inverse, np.concatenate([counts, how_often])).astype(np.int64)
        return PairCounts(codes, counts, count_V)

    def pairs(self) -> tuple[Array, Array]:
        """(a, b), int64 [P] each."""
        a, b = np.divmod(self.codes, len(self.count_V))
        return a, b

    def pmi(self) -> Array:
        """float64 [P]."""
        a, b = self.pairs()
        with np.errstate(divide="ignore", invalid="ignore"):
            log_p_V = np.log(self.count_V / max(int(self.count_V.sum()), 1))
            pmi_P: Array = np.log(self.counts / max(int(self.counts.sum()), 1)) - log_p_V[a] - log_p_V[b]
        return pmi_P


def token_chunks(datasets: Iterable[IndexedDataset]) -> Iterable[Array]:
    """The tokens of the datasets, in chunks; of each dataset the first MAX_TOKENS."""
    for dataset in datasets:
        end = min(dataset.num_tokens, MAX_TOKENS)
        for first in range(0, end, _CHUNK):
            yield dataset.read(first, min(_CHUNK, end - first))


# What a masking strategy is: how a row is cut into units, and how likely each is selected.
#
# A unit is a span of tokens that are masked together, all or none. B rows, T tokens per row, V vocabulary.


class Strategy(Protocol):
    """One way to cut rows into units."""

    def at(self, step: int) -> Strategy:
        """As it is for the rows of an optimizer step, counted by what was read."""
        ...

    def starts(self, tokens_BT: Array, noise: CounterRng) -> Array:
        """bool [B, T]: where a unit begins. Special tokens always end a unit."""
        ...

    def weights(self, tokens_BT: Array) -> Array | None:
        """float64 [B, T], above 0: how likely each token is selected, relative to the others; None: all alike."""
        ...


class Constant:
    """The same at every step."""

    def at(self, step: int) -> Self:
        return self


class AllAlike(Constant):
    """Units with the same chance, however they are cut."""

    def weights(self, tokens_BT: Array) -> Array | None:
        return None


@dataclass(frozen=True)
class WeighedIds(Constant):
    """Single tokens, each with the weight of its id."""

    weight_V: Array
    """float64 [V], above 0."""

    def starts(self, tokens_BT: Array, noise: CounterRng) -> Array:
        return np.ones(tokens_BT.shape, bool)

    def weights(self, tokens_BT: Array) -> Array | None:
        weights_BT: Array = self.weight_V[tokens_BT]
        return weights_BT


def no_longer_than(most: int, starts_BT: Array, whole_BT: Array | None = None) -> Array:
    """bool [B, T]: where units begin when those of more than `most` tokens are cut, each part as long as it may be. No
    part begins where `whole_BT` is set."""
    cut_BT = starts_BT.copy()
    cut_BT[:, 0] = True
    cut_M = cut_BT.reshape(-1)
    may_cut_M = np.ones(cut_M.size, bool) if whole_BT is None else ~whole_BT.reshape(-1)
    edges = np.append(np.flatnonzero(cut_M), cut_M.size)
    for unit in np.flatnonzero(np.diff(edges) > most):
        begin, end = edges[unit : unit + 2].tolist()
        places = begin + 1 + np.flatnonzero(may_cut_M[begin + 1 : end])
        for place, following in pairwise([*places.tolist(), end]):
            if following - begin > most:
                cut_M[place], begin = True, place
    return cut_BT


# How often a model misses each id, by which a masking strategy chooses what to mask next.
#
# Counts are whole numbers, so that sums over ranks are exact, and weights that follow from them are the same on any
# mesh unless rounding turns a prediction over. Rows are masked ahead of the steps that learn from them: the rows of a
# period (`every` steps of reading) are masked by what was counted up to the beginning of the period before, which is
# there in time however far ahead they are prepared. V vocabulary.


class Difficulty:
    """Misses and targets of each id, of steps that were applied; older ones count half as much with each period.

    `settle` is called after each step by the thread that trains, `at` by the one that reads.
    """

    def __init__(self, vocab_size: int, every: int, samples_per_step: int) -> None:
        self._every, self._samples_per_step = every, samples_per_step
        self._nothing = torch.zeros(vocab_size, 2, dtype=torch.int64)
        self._local = self._nothing.clone()  # this rank's since the last settlement; rank 0's with all before
        self._settled: dict[int, Tensor] = {0: self._nothing, 1: self._nothing}
        self._noted: list[tuple[Tensor, Tensor]] = []

    def note(self, ids_N: Tensor, missed_N: Tensor) -> None:
        """Of a forward pass: targets, and whether another candidate had a higher score. Waits for nothing."""
        self._noted.append((ids_N, missed_N))

    def settle(self, samples: int, applied: bool, group: Group) -> None:
        """After a step, when so many samples were read: counts what was noted, if it was applied. Only at the end of a
        period it waits for the device, and is collective over the data ranks."""
        noted, self._noted = self._noted, []
        for ids_N, missed_N in noted if applied else ():
            pairs_N2 = torch.stack([missed_N.long(), torch.ones_like(ids_N)], dim=1)
            self._local = self._local.to(ids_N.device)
            self._local.index_add_(0, ids_N, pairs_N2)
        period, inside = divmod(samples // self._samples_per_step, self._every)
        if inside == 0:
            total_V2 = self.total(group)
            self._settled = {period: self._settled[period], period + 1: total_V2}
            self._local = total_V2 // 2 if group.rank == 0 else torch.zeros_like(total_V2)

    def at(self, step: int) -> Tensor:
        """int64 [V, 2]: (misses, targets) of each id, by which rows of this step of reading are masked."""
        return self._settled[step // self._every]

    def total(self, group: Group) -> Tensor:
        """int64 [V, 2]: counts of all ranks since the last settlement, with what is left of those before."""
        return group.all_reduce_(self._local.to("cpu", copy=True))

    def state(self, group: Group) -> Tensor:
        """int64 [3, V, 2]: of this period, of the next one, and since. Collective."""
        return torch.stack([*self._settled.values(), self.total(group)])

    def restore(self, state_3V2: Tensor, samples: int, group: Group) -> None:
        """The inverse of `state`, when so many samples were read; ConfigError where a step would begin elsewhere than
        what was counted."""
        if samples % self._samples_per_step:
            rule = f"divide the {samples:,} samples that were read, as what is masked depends on the steps before"
            raise ConfigError("batch.global_size", rule, got=self._samples_per_step)
        now_V2, next_V2, since_V2 = state_3V2.unbind()
        period = samples // self._samples_per_step // self._every
        self._settled = {period: now_V2, period + 1: next_V2}
        self._local = since_V2.clone() if group.rank == 0 else torch.zeros_like(since_V2)
        self._noted = []


# What a masking strategy may know of the text that a run trains on; each is read when it is asked for.


@dataclass(frozen=True)
class TrainingText:
    """The datasets of a run."""

    config: RunConfig
    datasets: Sequence[IndexedDataset]

    setting: str
    """What asks for the strategy, for errors."""

    difficulty: Difficulty | None = None
    """How often the run misses each id, for a strategy that follows it (`MaskingConfig.adapts`)."""

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.config.model.vocab_size

    def special_ids(self) -> list[int]:
        """Ids that are never masked."""
        assert self.config.masking is not None
        return self.config.masking.never_masked(self.config.data.end_token)

    def bytes_of_ids(self) -> Sequence[bytes | None]:
        """What each id of the run's tokenizer stands for (`bytes_of_ids`)."""
        return bytes_of_ids(str(self.config.data.tokenizer), self.vocab_size)

    def pair_counts(self) -> PairCounts:
        """How often tokens are neighbours; reads the text."""
        return PairCounts.of(token_chunks(self.datasets), self.vocab_size)

    def token_counts(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """int64 [V]: of all datasets together; ConfigError if one has none."""
        counts_V = np.zeros(self.vocab_size, np.int64)
        for dataset in self.datasets:
            if dataset.info is None:
                raise ConfigError(
                    self.setting,
                    "have a dataset with token counts (its .json file)",
                    got=self.config.flat()[self.setting],
                    hint="preprocess the text again, or change the strategy",
                )
            known = np.asarray(dataset.info.token_counts, np.int64)
            counts_V[: len(known)] += known
        return counts_V


# Neighbours that belong together are masked together (after Levine et al. 2021, arXiv 2010.01825).


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


# Single tokens, rare ones more often.


class Frequency(WeighedIds):
    """Tokens in proportion to (count + 1)^-power (after Zhang et al. 2023)."""

    @staticmethod
    def made(masking: MaskingConfig, text: TrainingText) -> Frequency:
        """By the counts that preprocessing has put beside the datasets."""
        return Frequency.of(text.token_counts().tolist(), masking.frequency_power)

    @staticmethod
    def of(token_counts: Sequence[int], power: float) -> Frequency:
        """From each id's count in the training text."""
        return Frequency((np.asarray(token_counts, np.float64) + 1) ** -power)


# Single tokens, more often those that the model misses: what it reads changes with what it has learned.
#
# After adaptive masking by how well a model predicts each token (Edman, Fraser 2025, arXiv 2510.20475, "Mask and You
# Shall Receive").


FLOOR = 0.1
"""Added to all shares of misses, so that an id that is always predicted is asked for at times."""

PRIOR = 2
"""Targets that every id begins with, missed as often as all are together."""


@dataclass(frozen=True)
class Hardest(WeighedIds):
    """Ids in proportion to FLOOR plus the share of times that they were missed; all alike until that is known."""

    difficulty: Difficulty
    _latest: list[tuple[Tensor, Hardest]] = field(default_factory=list)
    """The counts that were last asked for, and what became of them: one pass over the vocabulary a period."""

    @staticmethod
    def made(masking: MaskingConfig, text: TrainingText) -> Hardest:
        """By what the run counts; the training-free head will need the text's token counts."""
        text.token_counts()
        assert text.difficulty is not None
        return Hardest(np.ones(text.vocab_size), text.difficulty)

    def at(self, step: int) -> Hardest:
        """With the weights of a step."""
        counts_V2 = self.difficulty.at(step)
        if not self._latest or self._latest[0][0] is not counts_V2:
            self._latest[:] = [(counts_V2, self._weighed_by(counts_V2))]
        return self._latest[0][1]

    def _weighed_by(self, counts_V2: Tensor) -> Hardest:
        misses_V, targets_V = counts_V2.numpy().astype(np.float64).T
        share = (misses_V.sum() + PRIOR) / (targets_V.sum() + PRIOR)
        weight_V = FLOOR + (misses_V + PRIOR * share) / (targets_V + PRIOR)
        return Hardest(weight_V[: len(self.weight_V)], self.difficulty)


# Single tokens, more often those that say much about what stands beside them.
#
# After InforMask (Sadeq, Xu, McAuley 2022, arXiv 2210.11771), which prefers tokens with a high pointwise mutual
# information (PMI) with the rest of their row. Here an id has one weight, its mean PMI with its neighbours in the
# training text: so that how often an id is selected depends on the id alone, and the training-free head remains exact.


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


# Spans of random lengths (SpanBERT, Joshi et al. 2020, arXiv 1907.10529).


@dataclass(frozen=True)
class Spans(AllAlike):
    """Spans whose lengths follow the paper's distribution, geometric of what is at most `max_tokens`: P(l) is in
    proportion to stop (1 - stop)^(l - 1), mean 3.8 for 0.2 and 10. Lengths are in tokens; the paper's are in words.

    The whole row is divided into such spans, so that those that are chosen have these lengths and never overlap.
    """

    stop: float
    max_tokens: int

    @staticmethod
    def made(masking: MaskingConfig, text: TrainingText) -> Spans:
        """By the settings alone."""
        return Spans(masking.span_stop, masking.longest_unit(text.config.data.sequence_length))

    def starts(self, tokens_BT: Array, noise: CounterRng) -> Array:
        rows, length = tokens_BT.shape
        draw_BT = noise.uniform(Purpose.SPAN_LENGTHS, length)
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


# Single tokens, all with the same chance (BERT).


class Uniform(AllAlike):
    """Every token is a unit."""

    @staticmethod
    def made(masking: MaskingConfig, text: TrainingText) -> Uniform:
        """Needs neither."""
        return Uniform()

    def starts(self, tokens_BT: Array, noise: CounterRng) -> Array:
        return np.ones(tokens_BT.shape, bool)


# Single tokens by weights of their ids that a file gives: those of parts of speech, say, or any other of one's own.
#
# A `.npy` of numpy, a number above 0 for each id. It is read once and stays what it is over a run.


class Weights(WeighedIds):
    """Tokens in proportion to the given weights."""

    @staticmethod
    def made(masking: MaskingConfig, text: TrainingText) -> Weights:
        """By the file that `data.id_weights` names; the training-free head will need the text's token counts."""
        text.token_counts()
        return Weights.read(str(text.config.data.id_weights), text.vocab_size)

    @staticmethod
    def read(path: str, vocab_size: int) -> Weights:
        """ConfigError unless the file has weights of so many ids; 1 of ids behind them, which only the model has. A
        URL's is fetched first."""
        weight_V = open_array("data.id_weights", "name a file of numpy", path)
        if weight_V.ndim != 1 or weight_V.dtype.kind not in "fiu" or not 0 < len(weight_V) <= vocab_size:
            rule = f"hold a number for each of at most model.vocab_size ({vocab_size}) ids"
            raise ConfigError("data.id_weights", rule, got=f"{weight_V.dtype} {weight_V.shape}")
        weight_V = weight_V.astype(np.float64)
        if not (np.isfinite(weight_V) & (weight_V > 0)).all():
            id_ = int(np.flatnonzero(~(np.isfinite(weight_V) & (weight_V > 0)))[0])
            raise ConfigError("data.id_weights", "hold numbers above 0", got=f"{weight_V[id_]:g} for id {id_}")
        return Weights(np.pad(weight_V, (0, vocab_size - len(weight_V)), constant_values=1.0))


# All tokens of a word together (BERT's "whole word masking"), with one meaning for all tokenizers.
#
# A word is a run of letters of one script and of digits, with the marks on them, whatever spaces or signs its
# tokenizer puts in front. All else (punctuation, symbols, spaces) is a unit token by token. So are scripts that are
# written without spaces, in which a tokenizer's tokens are the nearest to words. A character, with the marks that
# follow it, is never cut: byte-level tokens that are parts of one are masked together.
#
# M tokens of all rows, K bytes of these, C characters, V vocabulary.


_APART, _WITHOUT_SPACES, _MARK, _DIGIT, _LETTER = range(5)
"""Kinds of characters; letters of each script have a number of their own, from the last one on."""

_BETWEEN_ROWS = b"\0\0\0"
"""So many that a row whose last character is cut off reads nothing of the next row."""

_SCRIPTS_WITHOUT_SPACES = (
    *("CJK", "HIRAGANA", "KATAKANA", "HALFWIDTH", "BOPOMOFO", "YI"),
    *("THAI", "LAO", "KHMER", "MYANMAR", "TAI", "NEW", "JAVANESE", "BALINESE"),
)
"""By the first word of their letters' names in Unicode (NEW TAI LUE)."""


@dataclass(frozen=True)
class WholeWords(AllAlike):
    """A word is a unit, and of a longer one each run of at most `max_tokens` tokens."""

    bytes_: Array
    """uint8: what all ids stand for, one after another, and last what stands between rows."""

    ends_V: Array
    """int64: where the bytes of each of these end there."""

    max_tokens: int

    @staticmethod
    def made(masking: MaskingConfig, text: TrainingText) -> WholeWords:
        """By what the tokens of the run's tokenizer stand for."""
        return WholeWords.of(text.bytes_of_ids(), masking.longest_unit(text.config.data.sequence_length))

    @staticmethod
    def of(bytes_of_ids: Sequence[bytes | None], max_tokens: int) -> WholeWords:
        """From the bytes of each id, its space in front among them; None, of a special token, is no part of a word."""
        known = [*(text or b"\0" for text in bytes_of_ids), _BETWEEN_ROWS]
        ends_V = np.cumsum([len(text) for text in known])
        return WholeWords(np.frombuffer(b"".join(known), np.uint8), ends_V, max_tokens)

    def starts(self, tokens_BT: Array, noise: CounterRng) -> Array:
        apart_BT = np.pad(tokens_BT, ((0, 0), (1, 0)), constant_values=len(self.ends_V) - 1)
        joined_BT, whole_BT = (each_M.reshape(apart_BT.shape)[:, 1:] for each_M in self._joined(apart_BT.reshape(-1)))
        return no_longer_than(self.max_tokens, ~joined_BT, whole_BT)

    def _joined_by_bytes(self, tokens_M: Array) -> tuple[Array, Array]:
        """bool [M] each: whether a token continues the word of the one before; whether it continues its character."""
        char_M, last_char_M, kind_C, base_C = self._characters(tokens_M)
        before_M = np.roll(last_char_M, 1)
        whole_M = (char_M == before_M) | (kind_C[char_M] == _MARK)
        return whole_M | _in_one_word(kind_C[base_C[char_M]], kind_C[base_C[before_M]]), whole_M

    def _joined(self, tokens_M: Array) -> tuple[Array, Array]:
        """Equal to `_joined_by_bytes`, except for the first token, which has none before it. Reads only the bytes near
        ids that are not whole: from the token before, which holds the base, to the third after, where a cut character
        of four bytes ends at the latest."""
        whole_V, first_V, last_V = self._tables
        joined_M = _in_one_word(first_V[tokens_M], np.roll(last_V[tokens_M], 1))
        continues_M, near_M = np.zeros((2, len(tokens_M)), bool)
        places_N5 = np.flatnonzero(~whole_V[tokens_M])[:, None] + np.arange(-1, 4)
        near_M[places_N5.clip(0, len(tokens_M) - 1)] = True
        if near_M.any():
            after_M = near_M & np.roll(near_M, 1)
            by_bytes = self._joined_by_bytes(tokens_M[near_M])
            joined_M[after_M], continues_M[after_M] = (found[after_M[near_M]] for found in by_bytes)
        return joined_M, continues_M

    @cached_property
    def _tables(self) -> tuple[Array, Array, Array]:
        """[V] each: whether an id is whole characters, of which the first is no mark; the kinds of its first character
        and of its last one that is no mark, right where it is whole."""
        texts = (text.tobytes() for text in np.split(self.bytes_, self.ends_V[:-1]))
        utf8_V = np.array([text.decode(errors="ignore").encode() == text for text in texts])
        char_V, last_char_V, kind_C, base_C = self._characters(np.arange(len(self.ends_V)))
        return utf8_V & (kind_C[char_V] != _MARK), kind_C[char_V], kind_C[base_C[last_char_V]]

    def _characters(self, tokens_M: Array) -> tuple[Array, Array, Array, Array]:
        """int64 [M] twice: the characters of each token's first and last byte; [C] each: the kind of each character,
        and the character that it is a mark on, or itself."""
        size_M = np.diff(self.ends_V, prepend=0)[tokens_M]
        last_M = size_M.cumsum() - 1
        byte_K = self.bytes_[np.repeat(self.ends_V[tokens_M] - 1 - last_M, size_M) + np.arange(size_M.sum())]
        leads_K = (byte_K & 0xC0) != 0x80
        leads_K[:1] = True
        char_K = leads_K.cumsum() - 1
        kind_C = _kinds()[_code_points(byte_K, np.flatnonzero(leads_K))]
        base_C = np.maximum.accumulate(np.where(kind_C == _MARK, 0, np.arange(len(kind_C))))
        return char_K[last_M + 1 - size_M], char_K[last_M], kind_C, base_C


def _in_one_word(kind_M: Array, before_M: Array) -> Array:
    """bool [M]: whether characters of these kinds, one after the other, are of one word."""
    lesser_M, greater_M = np.minimum(kind_M, before_M), np.maximum(kind_M, before_M)
    joined_M: Array = (lesser_M == _DIGIT) | ((lesser_M >= _LETTER) & (lesser_M == greater_M))
    return joined_M


def _code_points(byte_K: Array, lead_C: Array) -> Array:
    """int64 [C]: of the characters whose first bytes are at `lead_C`; of those that a row cuts off, any."""
    padded_K = np.pad(byte_K, (0, 3)).astype(np.int64)
    code_C = padded_K[lead_C]
    length_C = 1 + sum((code_C >= first).astype(np.int64) for first in (0xC0, 0xE0, 0xF0))
    code_C = np.where(length_C > 1, code_C & (0x7F >> length_C), code_C)
    for place in (1, 2, 3):
        code_C = np.where(length_C > place, code_C << 6 | padded_K[lead_C + place] & 0x3F, code_C)
    return np.minimum(code_C, 0x10FFFF)


@cache
def _kinds() -> Array:
    """int16 [0x110000]: the kind of each character of Unicode; takes 0.3 s, once."""
    numbers = dict.fromkeys(_SCRIPTS_WITHOUT_SPACES, _WITHOUT_SPACES)

    def kind(char: str) -> int:
        category = unicodedata.category(char)
        if category[0] == "M" or category in ("Lm", "Cf"):  # also what lengthens or repeats the letter before
            return _MARK
        if category[0] == "N":
            return _DIGIT
        if category[0] != "L":
            return _APART
        return numbers.setdefault(unicodedata.name(char, "?").split()[0], _LETTER + len(numbers))

    return np.array([kind(chr(code)) for code in range(0x110000)], np.int16)


# Masking strategies: how a row is cut into units, and how likely each is selected; each a file, and a line here.


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


def strategy_of(masking: MaskingConfig, text: TrainingText) -> Strategy:
    """By `masking.strategy`, which may name a class of one's own with the same `made`; ConfigError where that cannot be
    imported."""
    if masking.strategy_is_custom():
        made: Strategy = load_named("masking.strategy", masking.strategy).made(masking, text)
        return made
    return STRATEGIES[masking.strategy](masking, text)
