"""What the micro-batches of a step measured, told to all ranks in one message.

W ranks, A accumulation steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megahead.distributed import Group
from megahead.engine import ForwardTime
from megahead.objectives import DetectionResult, DetectionSums, PhraseResult, PhraseSums


@dataclass(frozen=True)
class Measured:
    """Of one step, the same on every rank."""

    losses_WA: Tensor
    """[W, A] on the CPU, in float64."""

    forward_seconds: list[float]
    """How long each rank's forward passes took."""

    detection: DetectionResult | None
    """How well replaced tokens were told from others, in runs that replace some."""

    phrases: PhraseResult | None
    """How well masked phrases were found, in runs that look for them."""


class Tally:
    """Of one step at a time; a model notes here what it finds beside its loss (one kind of sums)."""

    def __init__(self, world_group: Group, tensor_ranks: int) -> None:
        """`world_group`: all ranks, for CPU tensors; each `tensor_ranks` consecutive ones have the same batches."""
        self._world_group, self._tensor_ranks = world_group, tensor_ranks
        self._noted: list[Tensor] = []
        self._kind: type[DetectionSums[Any]] | type[PhraseSums[Any]] = DetectionSums

    def note(self, sums: DetectionSums[Tensor] | PhraseSums[Tensor]) -> None:
        """What one batch adds, still on its device: nothing waits for that."""
        self._kind = type(sums)
        self._noted.append(torch.stack([value.detach().double() for value in sums]))

    def gather(self, losses: Sequence[Tensor], forward_time: ForwardTime) -> Measured:
        """That of all ranks, from this one's `losses`, one for each of its micro-batches, and from what was noted since
        the last call. Collective; waits for the device, once."""
        noted = [torch.stack(self._noted).sum(0)] if self._noted else []
        self._noted.clear()
        mine = torch.cat([torch.stack(list(losses)).double(), *noted]).cpu()
        gathered = self._world_group.all_gather(torch.cat([mine, mine.new_tensor([forward_time.take()])]))
        losses_WA, noted_WS, forward_W1 = gathered.tensor_split((len(losses), -1), dim=1)
        sums = self._kind(*noted_WS[:: self._tensor_ranks].sum(0).tolist()) if noted else None
        return Measured(
            losses_WA,
            forward_W1.flatten().tolist(),
            detection=DetectionResult.of(sums) if isinstance(sums, DetectionSums) else None,
            phrases=PhraseResult.of(sums) if isinstance(sums, PhraseSums) else None,
        )
