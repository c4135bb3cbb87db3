"""Prefetches micro-batches with their candidates in a background thread."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from megahead.config.data import BatchConfig, DataConfig
from megahead.data.batch import Batch, CausalCollator, RowCollator
from megahead.data.loader import BatchReader
from megahead.data.samples import RowSource, derive_seed
from megahead.distributed.group import Group
from megahead.losses.candidates import Candidates
from megahead.losses.contrastive import CandidateSet, Objective
from megahead.objectives.auxiliary import Auxiliary, Targets
from megahead.objectives.micro_batch import MicroBatch
from megahead.sharded_embedding.table import RowPlan, plan_rows

# A candidate group is part of a micro-batch, or several complete ones, consecutive over ranks and accumulation steps.
# Every rank can look up the row of any id, so that ranks exchange only ids to form a group, 4 bytes per target.
#
# G targets of a candidate group, R data ranks, A accumulation steps.

_SEED_PURPOSE = 0xCA4D1DA7E5  # makes these random numbers independent of others from the run's seed


@dataclass(frozen=True)
class CandidateGroups:
    """Chooses the candidates of a rank's micro-batches. They do not depend on the number of ranks."""

    objective: Objective
    group_samples: int
    micro_size: int
    seed: int

    def choose(
        self, first_sample: int, batches: list[Batch], counts_RA: Tensor, ranks: Group
    ) -> list[tuple[Candidates, ...]]:
        """For each micro-batch, the candidates of each candidate group with samples in it.

        The global batch starts at `first_sample`; its micro-batch k * R + r is rank r's, with counts_RA[r, k]
        targets. Collective if groups are larger than micro-batches: one all-gather of ids.
        """
        if self.group_samples <= self.micro_size:
            starts = [first_sample + (k * ranks.size + ranks.rank) * self.micro_size for k in range(len(batches))]
            return [self._choose_within_batch(start, batch) for start, batch in zip(starts, batches, strict=True)]
        ids = gather_targets([batch.target_ids_N for batch in batches], counts_RA, ranks)
        per_group = self.group_samples // self.micro_size  # micro-batches
        local_indices = [k * ranks.size + ranks.rank for k in range(len(batches))]
        candidate_sets = {
            group: self._candidate_set(first_sample, group, torch.cat(ids[group * per_group :][:per_group]))
            for group in {k // per_group for k in local_indices}
        }
        return [
            (candidate_sets[k // per_group].candidates(batch.target_ids_N, batch.weight_N),)
            for k, batch in zip(local_indices, batches, strict=True)
        ]

    def _choose_within_batch(self, first_sample: int, batch: Batch) -> tuple[Candidates, ...]:
        """The candidates of each group of a micro-batch that consists of complete groups and starts at `first_sample`.

        Splits the targets at the ends of groups; `target_index_N` indexes the concatenated rows."""
        rows, row_length = batch.input_ids_BT.shape
        ends = torch.arange(self.group_samples, rows + 1, self.group_samples) * row_length
        sizes = torch.searchsorted(batch.target_index_N, ends).diff(prepend=torch.zeros(1, dtype=torch.int64))
        groups = batch.target_ids_N.split(sizes.tolist())
        weights = [None] * len(groups) if batch.weight_N is None else batch.weight_N.split(sizes.tolist())
        return tuple(
            self._candidate_set(first_sample, group, ids).candidates(ids, weight_N)
            for group, (ids, weight_N) in enumerate(zip(groups, weights, strict=True))
        )

    def _candidate_set(self, first_sample: int, group: int, target_ids_G: Tensor) -> CandidateSet:
        """The candidate set of the group with index `group`, counted from `first_sample`."""
        seed = derive_seed(self.seed, first_sample + group * self.group_samples, _SEED_PURPOSE)
        return self.objective.candidate_set(target_ids_G, seed=seed)


def gather_targets(local_ids: list[Tensor], counts_RA: Tensor, ranks: Group) -> list[Tensor]:
    """The target ids of every micro-batch of the global batch, in the order of their samples, on every rank.

    `local_ids`: the targets of this rank's A micro-batches; counts_RA: the number of targets of each micro-batch. One
    all-gather of 4-byte ids, padded to the rank with most targets.
    """
    ids = torch.cat(local_ids)
    padded = ids.new_zeros(int(counts_RA.sum(1).max()), dtype=torch.int32)
    padded[: len(ids)] = ids
    gathered, counts = ranks.all_gather(padded), counts_RA.tolist()
    by_rank = [ids[: sum(sizes)].long().split(sizes) for ids, sizes in zip(gathered, counts, strict=True)]
    return [parts[k] for k in range(counts_RA.shape[1]) for parts in by_rank]


T = TypeVar("T")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class StepBatches:
    """One rank's part of the global batch of one optimizer step."""

    micro_batches: list[MicroBatch]
    """In the order of their samples; one for each accumulation step."""

    unpadded_batches: list[Batch]
    """The micro-batches' batches before padding."""

    targets: int
    """Targets of the global batch, over all ranks."""

    candidates: float
    """Mean number of candidates of this rank's outputs (for logs); 0 means the whole vocabulary."""

    row_plan: RowPlan | None = None
    """The exchange of the embedding's rows for this step, if they are sharded."""


class StepLoader:
    """Splits global batches into micro-batches. A step's samples depend only on the index of its first one.

    In micro-step k rank r of R reads `micro_size` consecutive samples from `first + (k * R + r) * micro_size` on.
    `group`: the data ranks, used only from the loader's thread (see `Group.new_gloo_group`). `group_samples`: size of a
    candidate group (None: a micro-batch). `seed`: for random negatives. `collator`: masks the samples. `auxiliary`: the
    class of the auxiliary objective. `planning_group`: all ranks, if the embedding's rows are sharded over them;
    `tensor_group`: the ranks that read the same samples. Batches stay on the CPU, prepared for `device`.
    `half_precision`: whether `device` computes in half precision. `static_shapes`: whether batches are padded to few
    shapes.
    """

    def __init__(
        self,
        samples: RowSource,
        objective: Objective,
        data: DataConfig,
        batch: BatchConfig,
        group: Group,
        *,
        group_samples: int | None = None,
        seed: int = 0,
        device: torch.device = CPU,
        half_precision: bool = False,
        static_shapes: bool = False,
        collator: RowCollator | None = None,
        auxiliary: type[Auxiliary] = Auxiliary,
        planning_group: Group | None = None,
        tensor_group: Group | None = None,
    ) -> None:
        self._reader = BatchReader(samples, collator or CausalCollator(data))
        self._candidate_groups = CandidateGroups(objective, group_samples or batch.micro_size, batch.micro_size, seed)
        self._auxiliary, self._prefetch, self._batch, self._group = auxiliary, data.prefetch, batch, group
        self._device, self._half_precision, self._static_shapes = device, half_precision, static_shapes
        self._planning_group, self._tensor_group = planning_group, tensor_group

    def steps(self, first_sample: int) -> Generator[StepBatches, None, None]:
        """The batches of all optimizer steps from `first_sample` on, without end. Collective over the group."""
        return prefetch(self.step, itertools.count(first_sample, self._batch.global_size), self._prefetch)

    def step(self, first_sample: int) -> StepBatches:
        """The batches of the step that starts at `first_sample`.

        One all-gather of 4 A numbers. If candidate groups are larger than micro-batches, one more of ids, and another
        of the auxiliary objective's own targets.
        """
        ranks = self._group.size
        accumulation = self._batch.accumulation_steps(ranks)
        batches = [self._reader.read(self.samples(first_sample, k, self._group.rank)) for k in range(accumulation)]
        own_targets = [self._auxiliary.targets(batch) for batch in batches]
        sizes = [
            (
                batch.target_ids_N.numel(),
                0 if own is None else len(own.ids_P),
                batch.total_weight(),
                self._auxiliary.num_loss_terms(batch),
            )
            for batch, own in zip(batches, own_targets, strict=True)
        ]
        local_sizes = torch.tensor([[size or 0 for size in batch_sizes] for batch_sizes in sizes], dtype=torch.float64)
        counts_RA, own_counts_RA, weights_RA, auxiliary_RA = self._group.all_gather(local_sizes).unbind(-1)
        counts_RA = counts_RA.long()
        targets = int(counts_RA.sum())
        loss_weight, auxiliary_weight = (
            ranks * accumulation / max(float(x_RA.sum()), 1.0) for x_RA in (weights_RA, auxiliary_RA)
        )
        factors = loss_weight, None if sizes[0][-1] is None else auxiliary_weight
        candidates = self._candidate_groups.choose(first_sample, batches, counts_RA, self._group)
        auxiliary_candidates = self._own_candidates(first_sample, batches, own_targets, own_counts_RA.long())
        parts = zip(batches, candidates, auxiliary_candidates, strict=True)
        micro_batches = [MicroBatch(batch, groups, *factors, own) for batch, groups, own in parts]
        prepared = [
            micro.prepare_for(self._device, self._half_precision, self._static_shapes) for micro in micro_batches
        ]
        return StepBatches(prepared, batches, targets, mean_candidates(micro_batches), self._plan_rows(prepared))

    def _own_candidates(
        self, first_sample: int, batches: Sequence[Batch], targets: Sequence[Targets | None], counts_RA: Tensor
    ) -> list[tuple[Candidates, ...]]:
        """For each micro-batch, the candidates of the auxiliary objective's own targets; none if it has no targets."""
        auxiliary_batches = [
            replace(batch, target_index_N=own.index_P, target_ids_N=own.ids_P, weight_N=None)
            for batch, own in zip(batches, targets, strict=True)
            if own is not None
        ]
        if not auxiliary_batches:
            return [()] * len(batches)
        return self._candidate_groups.choose(first_sample, auxiliary_batches, counts_RA, self._group)

    def _plan_rows(self, micro_batches: list[MicroBatch]) -> RowPlan | None:
        """The exchange of the embedding's rows, each fetched once for all micro-batches of the step."""
        if self._planning_group is None:
            return None
        ids = torch.cat([micro.ids() for micro in micro_batches])
        return plan_rows(ids, self._planning_group, len(micro_batches), self._tensor_group)

    def samples(self, first_sample: int, micro_step: int, rank: int) -> range:
        """The samples that `rank` reads for a micro-step of the step that starts at `first_sample`."""
        start = first_sample + (micro_step * self._group.size + rank) * self._batch.micro_size
        return range(start, start + self._batch.micro_size)


def mean_candidates(micro_batches: list[MicroBatch]) -> float:
    """Number of candidates, averaged over candidate groups; 0 for the whole vocabulary."""
    counts = [0 if g.ids_U is None else g.ids_U.numel() for micro in micro_batches for g in micro.candidates]
    return sum(counts) / len(counts)


def prefetch(prepare: Callable[[int], T], keys: Iterable[int], depth: int) -> Generator[T, None, None]:
    """Yields `prepare(key)` for each key in order; one background thread prepares up to `depth` of them ahead.

    The prepared keys depend only on the number of results consumed, not on timing, so `prepare` may call collectives:
    ranks that stop at the same key have prepared the same keys. An exception of `prepare` is raised for its key.
    """
    if depth == 0:
        yield from map(prepare, keys)
        return
    with ThreadPoolExecutor(1, thread_name_prefix="prefetch") as pool:
        pending: deque[Future[T]] = deque()
        for key in keys:
            pending.append(pool.submit(prepare, key))
            if len(pending) > depth:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
