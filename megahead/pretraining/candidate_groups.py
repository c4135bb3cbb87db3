"""Candidate groups: consecutive samples whose targets are candidates for each other, on whichever ranks they are.

Any rank can look up the row of any id itself, so that forming a group exchanges only ids, 4 bytes per target. A
candidate group is part of a micro-batch, or several complete ones, consecutive over ranks and accumulation steps.
Its `Pool` is made of all its targets and of random negatives drawn for it, and makes the candidates for the targets
that it has in one micro-batch.
Shapes: N targets of a micro-batch, G of a candidate group, R data ranks, A accumulation steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megahead.data import Batch
from megahead.data.shuffle import derive_seed
from megahead.distributed import Group
from megahead.objectives import Candidates, Objective, Pool

_PURPOSE = 0xCA4D1DA7E5  # makes these draws independent of others from the run's seed


@dataclass(frozen=True)
class CandidateGroups:
    """Chooses the candidates of a rank's micro-batches: the same for a sample on any number of ranks."""

    objective: Objective
    group_samples: int
    micro_size: int
    seed: int

    def choose(
        self, first_sample: int, batches: list[Batch], counts_RA: Tensor, ranks: Group
    ) -> list[tuple[Candidates, ...]]:
        """For each micro-batch, the candidates of each candidate group with samples in it.

        The global batch begins at `first_sample`; rank r of R has its micro-batches k * R + r, with counts_RA[r, k]
        targets. Collective where groups are larger than micro-batches: one all-gather of ids.
        """
        if self.group_samples <= self.micro_size:
            starts = [first_sample + (k * ranks.size + ranks.rank) * self.micro_size for k in range(len(batches))]
            return [self._within(start, batch) for start, batch in zip(starts, batches, strict=True)]
        ids = gather_targets([batch.target_ids_N for batch in batches], counts_RA, ranks)
        per_group = self.group_samples // self.micro_size  # micro-batches
        mine = [k * ranks.size + ranks.rank for k in range(len(batches))]
        pools = {
            group: self._pool(
                first_sample + group * self.group_samples, torch.cat(ids[group * per_group :][:per_group])
            )
            for group in {k // per_group for k in mine}
        }
        return [
            (pools[k // per_group].candidates(batch.target_ids_N, batch.weight_N),)
            for k, batch in zip(mine, batches, strict=True)
        ]

    def _within(self, first_sample: int, batch: Batch) -> tuple[Candidates, ...]:
        """The candidates of each group of a micro-batch that holds complete groups and begins at `first_sample`.

        Its targets are cut where groups end: `target_index_N` counts through the rows, one after another."""
        rows, row_length = batch.input_ids_BT.shape
        ends = torch.arange(self.group_samples, rows + 1, self.group_samples) * row_length
        sizes = torch.searchsorted(batch.target_index_N, ends).diff(prepend=torch.zeros(1, dtype=torch.int64))
        groups = batch.target_ids_N.split(sizes.tolist())
        weights = [None] * len(groups) if batch.weight_N is None else batch.weight_N.split(sizes.tolist())
        return tuple(
            self._pool(first_sample + group * self.group_samples, ids).candidates(ids, weight_N)
            for group, (ids, weight_N) in enumerate(zip(groups, weights, strict=True))
        )

    def _pool(self, first_sample: int, target_ids_G: Tensor) -> Pool:
        return self.objective.pool(target_ids_G, seed=derive_seed(self.seed, first_sample, _PURPOSE))


def gather_targets(mine: list[Tensor], counts_RA: Tensor, ranks: Group) -> list[Tensor]:
    """The target ids of every micro-batch of the global batch, in the order of their samples, on every rank.

    `mine`: those of this rank's A micro-batches; counts_RA: how many each micro-batch of each rank has. One all-gather,
    of as many 4-byte ids as the rank with most targets has.
    """
    local = torch.cat(mine)
    padded = local.new_zeros(int(counts_RA.sum(1).max()), dtype=torch.int32)
    padded[: len(local)] = local
    gathered_R = ranks.all_gather(padded)
    by_rank = [
        ids[: sum(counts)].long().split(counts) for ids, counts in zip(gathered_R, counts_RA.tolist(), strict=True)
    ]
    return [parts[k] for k in range(counts_RA.shape[1]) for parts in by_rank]
