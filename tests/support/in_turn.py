"""Ranks that take turns in one process, for a device that they would have to share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from megahead.distributed.group import Group

T = TypeVar("T")


@dataclass(frozen=True)
class Turn(Group):
    """One rank's turn. It gathers what the others sent in an earlier round, and sums of all ranks stay its own part."""

    sent: list[Tensor] = field(default_factory=list)
    earlier: list[list[Tensor]] | None = None

    def all_gather(self, tensor: Tensor) -> Tensor:
        place = len(self.sent)
        self.sent.append(tensor)
        others = self.earlier or [[tensor] * (place + 1)] * self.size
        return torch.stack([tensor if rank == self.rank else others[rank][place] for rank in range(self.size)])

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        return tensor


def in_turn(size: int, work: Callable[[Group], T]) -> list[T]:
    """What `work` gives on each rank, if what it sends does not depend on what it receives."""
    earlier: list[list[Tensor]] | None = None
    for _ in range(2):
        turns = [Turn(rank, size, earlier=earlier) for rank in range(size)]
        results = [work(turn) for turn in turns]
        earlier = [turn.sent for turn in turns]
    return results
