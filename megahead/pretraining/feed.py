"""Prepares each rank's micro-batches ahead, in a background thread.

Shapes: R data ranks, A accumulation steps.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from megahead.config import BatchConfig, DataConfig
from megahead.data import BatchReader, RowMasker, RowSource
from megahead.distributed import Group
from megahead.objectives import Objective
from megahead.pretraining.batch import MicroBatch, StepBatches
from megahead.pretraining.candidate_groups import CandidateGroups
from megahead.table import RowPlan, plan_rows

T = TypeVar("T")
CPU = torch.device("cpu")


class Feed:
    """Splits global batches into micro-batches. A step's samples depend only on the number of its first one.

    In micro-step k rank r of R reads `micro_size` consecutive samples from `first + (k * R + r) * micro_size` on.
    `group`: the data ranks, used only from the feed's thread (see `Group.side_channel`). `group_samples`: size of a
    candidate group (None: a micro-batch). `seed`: for random negatives. `masker`: masks what is read. `owners`: all
    ranks, over a connection of their own, if the embedding's rows are sharded over them; `sharing`: those that read
    the same samples. Batches are on the CPU, prepared for `device`, which computes in half precision if `half`.
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
        half: bool = False,
        masker: RowMasker | None = None,
        owners: Group | None = None,
        sharing: Group | None = None,
    ) -> None:
        self._reader = BatchReader(samples, data, masker)
        self._candidate_groups = CandidateGroups(objective, group_samples or batch.micro_size, batch.micro_size, seed)
        self._prefetch = data.prefetch
        self._batch = batch
        self._group = group
        self._device, self._half = device, half
        self._owners, self._sharing = owners, sharing

    def steps(self, first_sample: int) -> Generator[StepBatches, None, None]:
        """The batches of all optimizer steps from `first_sample` on; never ends. Collective over the group."""
        return prefetched(self.step, itertools.count(first_sample, self._batch.global_size), self._prefetch)

    def step(self, first_sample: int) -> StepBatches:
        """The batches of the step that begins at `first_sample`.

        One all-gather of 3 A numbers, and one of ids if candidate groups are larger than micro-batches.
        """
        ranks = self._group.size
        accumulation = self._batch.accumulation_steps(ranks)
        batches = [self._reader.read(self.samples(first_sample, k, self._group.rank)) for k in range(accumulation)]
        sizes = [(batch.target_ids_N.numel(), batch.weight(), batch.judged()) for batch in batches]
        mine = torch.tensor(sizes, dtype=torch.float64)
        counts_RA, weights_RA, judged_RA = self._group.all_gather(mine).unbind(-1)
        counts_RA = counts_RA.long()
        targets = int(counts_RA.sum())
        scales = [ranks * accumulation / max(float(each_RA.sum()), 1.0) for each_RA in (weights_RA, judged_RA)]
        candidates = self._candidate_groups.choose(first_sample, batches, counts_RA, self._group)
        micro_batches = [MicroBatch(*pair, *scales) for pair in zip(batches, candidates, strict=True)]
        staged = [micro.staged(self._device, self._half) for micro in micro_batches]
        return StepBatches(staged, targets, mean_candidates(micro_batches), self._plan(staged))

    def _plan(self, micro_batches: list[MicroBatch]) -> RowPlan | None:
        """The exchange of the embedding's rows, each of which is fetched once for all micro-batches of the step."""
        if self._owners is None:
            return None
        ids = torch.cat([micro.ids() for micro in micro_batches])
        return plan_rows(ids, self._owners, len(micro_batches), self._sharing)

    def samples(self, first_sample: int, micro_step: int, rank: int) -> range:
        """The samples that `rank` reads for a micro-step of the step that begins at `first_sample`."""
        start = first_sample + (micro_step * self._group.size + rank) * self._batch.micro_size
        return range(start, start + self._batch.micro_size)


def mean_candidates(micro_batches: list[MicroBatch]) -> float:
    """Number of candidates, averaged over candidate groups; 0 for the whole vocabulary."""
    counts = [0 if g.ids_U is None else g.ids_U.numel() for micro in micro_batches for g in micro.candidates]
    return sum(counts) / len(counts)


def prefetched(prepare: Callable[[int], T], keys: Iterable[int], depth: int) -> Generator[T, None, None]:
    """`prepare(key)` for each key in order, up to `depth` of them ahead in one background thread.

    Which keys are prepared depends only on how many results were taken, not on timing, so `prepare` may call
    collectives: ranks that stop at the same key have prepared the same keys. Its exception is raised where its result
    is taken.
    """
    if depth == 0:
        yield from map(prepare, keys)
        return
    with ThreadPoolExecutor(1, thread_name_prefix="prefetch") as pool:
        waiting: deque[Future[T]] = deque()
        for key in keys:
            waiting.append(pool.submit(prepare, key))
            if len(waiting) > depth:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
