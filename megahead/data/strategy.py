"""What a masking strategy is, and what it may know: the training text, and what the model has missed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from megahead.config.run import RunConfig
from megahead.data.indexed import Array, IndexedDataset
from megahead.data.samples import CounterRng
from megahead.data.vocabulary_map import bytes_of_ids
from megahead.distributed.group import Group
from megahead.errors import ConfigError

# How often tokens are neighbours in a text, and how much more often than by chance, by their pointwise mutual
# information: PMI(a, b) = log(p(ab) / (p(a) p(b))), in nats. V vocabulary, P pairs.

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


# What a masking strategy is. A unit is a span of tokens that are masked together, all or none.
#
# B rows, T tokens per row, V vocabulary.


class Strategy:
    """One way to cut rows into units; by itself the same at every step, of single tokens that are all alike."""

    def at(self, step: int) -> Strategy:
        """As it is for the rows of an optimizer step, counted by what was read."""
        return self

    def starts(self, tokens_BT: Array, noise: CounterRng) -> Array:
        """bool [B, T]: where a unit begins. Special tokens always end a unit."""
        return np.ones(tokens_BT.shape, bool)

    def weights(self, tokens_BT: Array) -> Array | None:
        """float64 [B, T], above 0: how likely each token is selected, relative to the others; None: all alike."""
        return None


class AllAlike(Strategy):
    """Units with the same chance, however they are cut."""


@dataclass(frozen=True)
class WeighedIds(Strategy):
    """Single tokens, each with the weight of its id."""

    weight_V: Array
    """float64 [V], above 0."""

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


# How often a model misses each id, by which a masking strategy chooses what to mask next. Counts are whole numbers, so
# that sums over ranks are exact, and weights that follow from them are the same on any mesh unless rounding turns a
# prediction over. Rows are masked ahead of the steps that learn from them: the rows of a period (`every` steps of
# reading) are masked by what was counted up to the beginning of the period before, which is there in time however far
# ahead they are prepared. V vocabulary.


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


@dataclass(frozen=True)
class TrainingText:
    """What a masking strategy may know of the text that a run trains on; each is read when it is asked for."""

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
