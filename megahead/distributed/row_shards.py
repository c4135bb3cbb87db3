"""A tensor whose rows are sharded round-robin over a group: row i lies with rank i mod R at place i // R."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megahead.distributed.group import Group


@dataclass(frozen=True)
class RowShard:
    """One rank's rows of such a tensor."""

    part: Tensor

    rows: int
    """Of all ranks together."""

    @property
    def shape(self) -> torch.Size:
        """The whole tensor's."""
        return torch.Size([self.rows, *self.part.shape[1:]])


def fill_row_shard_(part: Tensor, blocks: Iterable[Tensor], group: Group) -> None:
    """Fills `part` [n, ...] with this rank's rows of a tensor [V, ...] that comes in consecutive blocks [b, ...].

    Sends nothing: every rank reads all blocks, and holds one at a time. n is V / ranks, up or down."""
    first = 0
    for block in blocks:
        own = block[(group.rank - first) % group.size :: group.size]
        place = len(range(group.rank, first, group.size))
        part[place : place + len(own)] = own
        first += len(block)


def interleave_rows(parts: Sequence[Tensor]) -> Tensor:
    """The whole tensor, from all ranks' parts in rank order."""
    if len(parts) == 1:
        return parts[0]
    whole = torch.empty(sum(len(part) for part in parts), *parts[0].shape[1:], dtype=parts[0].dtype)
    for rank, part in enumerate(parts):
        whole[rank :: len(parts)] = part
    return whole
