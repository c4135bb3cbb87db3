"""Interface of masking strategies, and their inputs: the training text, and the model's error counts."""

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

# Bigram counts of a text, and pointwise mutual information in nats: PMI(a, b) = log(p(ab) / (p(a) p(b))).
# V vocabulary, P bigrams.

MAX_TOKENS = 1 << 26
"""Only the first tokens of each dataset are counted, which is enough to find frequent pairs."""


@dataclass(frozen=True)
class PairCounts:
    """Counts of bigrams (a, b)."""

    codes: Array
    """int64 [P], increasing: a * V + b."""

    counts: Array
    """int64 [P]."""

    count_V: Array
    """int64: unigram counts."""

    @staticmethod
    def count(chunks: Iterable[Array], vocab_size: int) -> PairCounts:
        """Counts the bigrams in `chunks`.

        About 0.3 s per million tokens; memory is proportional to the number of distinct bigrams.
        """
        count_V = np.zeros(vocab_size, np.int64)
        codes, counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
        for chunk in chunks:
            tokens = chunk.astype(np.int64)
            count_V += np.bincount(tokens, minlength=vocab_size)
            chunk_codes, chunk_counts = np.unique(tokens[:-1] * vocab_size + tokens[1:], return_counts=True)
            codes, inverse = np.unique(np.concatenate([codes, chunk_codes]), return_inverse=True)
            counts = np.bincount(inverse, np.concatenate([counts, chunk_counts])).astype(np.int64)
        return PairCounts(codes, counts, count_V)

    def pairs(self) -> tuple[Array, Array]:
        """(a, b), int64 [P] each."""
        a, b = np.divmod(self.codes, len(self.count_V))
        return a, b

    def selected(self, min_count: int, excluded: Sequence[int]) -> Array:
        """bool [P]: the bigrams that occur `min_count` times at least, and have none of the `excluded` ids."""
        a, b = self.pairs()
        selected_P: Array = (self.counts >= min_count) & ~np.isin(a, excluded) & ~np.isin(b, excluded)
        return selected_P

    def pmi(self) -> Array:
        """float64 [P]: the PMI of each bigram."""
        a, b = self.pairs()
        with np.errstate(divide="ignore", invalid="ignore"):
            log_p_V = np.log(self.count_V / max(int(self.count_V.sum()), 1))
            pmi_P: Array = np.log(self.counts / max(int(self.counts.sum()), 1)) - log_p_V[a] - log_p_V[b]
        return pmi_P


# Interface of masking strategies. A unit is a span of tokens that are masked together. B rows, T tokens per row, V
# vocabulary.


class Strategy:
    """Splits rows into units. The default: every token is a unit, with equal weights, at every step."""

    def at(self, step: int) -> Strategy:
        """The strategy for the rows of an optimizer step."""
        return self

    def starts(self, tokens_BT: Array, rng: CounterRng) -> Array:
        """bool [B, T]: the first token of each unit. Special tokens always end a unit."""
        return np.ones(tokens_BT.shape, bool)

    def weights(self, tokens_BT: Array) -> Array | None:
        """float64 [B, T], positive: relative sampling weights of the tokens; None: equal weights."""
        return None


class EqualWeights(Strategy):
    """Base of strategies that choose units and leave their weights equal."""


@dataclass(frozen=True)
class WeightedIds(Strategy):
    """Every token is a unit, with the sampling weight of its id."""

    weight_V: Array
    """float64 [V], positive."""

    def weights(self, tokens_BT: Array) -> Array | None:
        weights_BT: Array = self.weight_V[tokens_BT]
        return weights_BT


def split_long_units(max_tokens: int, starts_BT: Array, keep_joined_BT: Array | None = None) -> Array:
    """bool [B, T]: `starts_BT` and the starts that split longer units greedily into units of at most `max_tokens`. No
    unit is split before a token where `keep_joined_BT` is true."""
    starts_BT = starts_BT.copy()
    starts_BT[:, 0] = True
    starts_M = starts_BT.reshape(-1)
    may_split_M = np.ones(starts_M.size, bool) if keep_joined_BT is None else ~keep_joined_BT.reshape(-1)
    edges = np.append(np.flatnonzero(starts_M), starts_M.size)
    for unit in np.flatnonzero(np.diff(edges) > max_tokens):
        start, end = edges[unit : unit + 2].tolist()
        splits = start + 1 + np.flatnonzero(may_split_M[start + 1 : end])
        for split, next_split in pairwise([*splits.tolist(), end]):
            if next_split - start > max_tokens:
                starts_M[split], start = True, split
    return starts_BT


# Error counts of the model for each id, by which an adaptive masking strategy selects tokens. Counts are integers, so
# sums over ranks are exact and the same on any mesh, unless rounding changes a prediction. Rows are masked ahead of the
# steps that train on them. The rows of a period (`period_steps` steps) are masked by the counts at the start of the
# previous period, so that prefetching never waits. V vocabulary.


class TargetErrorCounts:
    """Errors and targets of each id in steps whose update was applied (not skipped), halved after each period.

    The training thread calls `end_step` after each step. The prefetching thread calls `at`.
    """

    def __init__(self, vocab_size: int, period_steps: int, samples_per_step: int) -> None:
        self._period_steps, self._samples_per_step = period_steps, samples_per_step
        zeros_V2 = torch.zeros(vocab_size, 2, dtype=torch.int64)
        self._local = zeros_V2.clone()  # of this rank in this period; on rank 0 also of earlier periods
        self._counts_of_period: dict[int, Tensor] = {0: zeros_V2, 1: zeros_V2}
        self._recorded: list[tuple[Tensor, Tensor]] = []

    def record(self, ids_N: Tensor, is_error_N: Tensor) -> None:
        """Records the targets of a forward pass, and whether each was an error. Asynchronous."""
        self._recorded.append((ids_N, is_error_N))

    def end_step(self, samples: int, applied: bool, group: Group) -> None:
        """Adds the recorded targets of a step to the counts, if it was applied. At the end of a period it synchronizes
        with the device and is collective over the data ranks. `samples`: number of samples read so far."""
        recorded, self._recorded = self._recorded, []
        for ids_N, is_error_N in recorded if applied else ():
            pairs_N2 = torch.stack([is_error_N.long(), torch.ones_like(ids_N)], dim=1)
            self._local = self._local.to(ids_N.device)
            self._local.index_add_(0, ids_N, pairs_N2)
        period, step_in_period = divmod(samples // self._samples_per_step, self._period_steps)
        if step_in_period == 0:
            total_V2 = self.total(group)
            self._counts_of_period = {period: self._counts_of_period[period], period + 1: total_V2}
            self._local = total_V2 // 2 if group.rank == 0 else torch.zeros_like(total_V2)

    def at(self, step: int) -> Tensor:
        """int64 [V, 2]: (errors, targets) of each id, for masking the rows of this step."""
        return self._counts_of_period[step // self._period_steps]

    def total(self, group: Group) -> Tensor:
        """int64 [V, 2]: the decayed counts of all ranks. Collective."""
        return group.all_reduce_(self._local.to("cpu", copy=True))

    def state(self, group: Group) -> Tensor:
        """int64 [3, V, 2]: the counts by which this period masks, and the next one, then `total`. Collective."""
        return torch.stack([*self._counts_of_period.values(), self.total(group)])

    def restore(self, state_3V2: Tensor, samples: int, group: Group) -> None:
        """Restores `state` after `samples` samples; ConfigError unless these are a whole number of steps."""
        if samples % self._samples_per_step:
            rule = f"divide the {samples:,} samples that were read, as what is masked depends on the steps before"
            raise ConfigError("batch.global_size", rule, got=self._samples_per_step)
        current_V2, next_V2, local_V2 = state_3V2.unbind()
        period = samples // self._samples_per_step // self._period_steps
        self._counts_of_period = {period: current_V2, period + 1: next_V2}
        self._local = local_V2.clone() if group.rank == 0 else torch.zeros_like(local_V2)
        self._recorded = []


@dataclass(frozen=True)
class TrainingText:
    """Statistics of the training text for masking strategies, computed on demand."""

    config: RunConfig
    datasets: Sequence[IndexedDataset]

    setting: str
    """The setting that names the strategy, for errors."""

    target_error_counts: TargetErrorCounts | None = None
    """Error counts of the run, for an adaptive strategy (`MaskingConfig.is_adaptive`)."""

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.config.model.vocab_size

    def special_ids(self) -> list[int]:
        """Ids that are never masked."""
        assert self.config.masking is not None
        return self.config.masking.unmaskable_ids(self.config.data.end_token)

    def bytes_of_ids(self) -> Sequence[bytes | None]:
        """The bytes of each id of the run's tokenizer."""
        return bytes_of_ids(str(self.config.data.tokenizer), self.vocab_size)

    def pair_counts(self) -> PairCounts:
        """Counts the bigrams of the text."""
        blocks = (block for dataset in self.datasets for block in dataset.blocks(MAX_TOKENS))
        return PairCounts.count(blocks, self.vocab_size)

    def token_counts(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """int64 [V]: token counts of all datasets together; ConfigError if one has none."""
        counts_V = np.zeros(self.vocab_size, np.int64)
        for dataset in self.datasets:
            if dataset.info is None:
                raise ConfigError(
                    self.setting,
                    "have a dataset with token counts (its .json file)",
                    got=self.config.flat()[self.setting],
                    hint="preprocess the text again, or change the strategy",
                )
            dataset_counts_V = np.asarray(dataset.info.token_counts, np.int64)
            counts_V[: len(dataset_counts_V)] += dataset_counts_V
        return counts_V
