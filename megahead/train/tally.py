"""What the micro-batches of a step measured, told to all ranks in one message.

W ranks, A accumulation steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megahead.distributed import Group
from megahead.engine import ForwardTime
from megahead.objectives import DetectionResult, DetectionSums


@dataclass(frozen=True)
class Measured:
    """Of one step, the same on every rank."""

    losses_WA: Tensor
    """[W, A] on the CPU, in float64."""

    forward_seconds: list[float]
    """How long each rank's forward passes took."""

    detection: DetectionResult | None
    """How well replaced tokens were told from others, in runs that replace some."""


class Tally:
    """Of one step at a time; a model notes here what it finds beside its loss (`Pretraining.note_detection`)."""

    def __init__(self, world_group: Group, tensor_ranks: int) -> None:
        """`world_group`: all ranks, for CPU tensors; each `tensor_ranks` consecutive ones have the same batches."""
        self._world_group, self._tensor_ranks = world_group, tensor_ranks
        self._detected: list[Tensor] = []

    def note_detection(self, sums: DetectionSums[Tensor]) -> None:
        """What one batch adds, still on its device: nothing waits for that."""
        self._detected.append(torch.stack([value.detach().double() for value in sums]))

    def gather(self, losses: Sequence[Tensor], forward_time: ForwardTime) -> Measured:
        """That of all ranks, from this one's `losses`, one for each of its micro-batches, and from what was noted since
        the last call. Collective; waits for the device, once."""
        noted = [torch.stack(self._detected).sum(0)] if self._detected else []
        self._detected.clear()
        mine = torch.cat([torch.stack(list(losses)).double(), *noted]).cpu()
        gathered = self._world_group.all_gather(torch.cat([mine, mine.new_tensor([forward_time.take()])]))
        losses_WA, detected_W5, forward_W1 = gathered.tensor_split((len(losses), -1), dim=1)
        return Measured(losses_WA, forward_W1.flatten().tolist(), self._result(detected_W5) if noted else None)

    def _result(self, detected_W5: Tensor) -> DetectionResult:
        of_data_ranks = detected_W5[:: self._tensor_ranks]
        return DetectionResult.of(DetectionSums(*of_data_ranks.sum(0).tolist()))
