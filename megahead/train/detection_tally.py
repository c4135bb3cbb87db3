"""Adds up how well replaced tokens are told from others, over the micro-batches of a step and all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from megahead.distributed import Group
from megahead.objectives import DetectionResult, DetectionSums


class DetectionTally:
    """Of one step at a time; a model notes its batches here (`Pretraining.note_detection`)."""

    def __init__(self) -> None:
        self._noted: list[Tensor] = []

    def note(self, sums: DetectionSums[Tensor]) -> None:
        """What one batch adds, still on its device: nothing waits for that."""
        self._noted.append(torch.stack([value.detach().double() for value in sums]))

    def take(self, data_group: Group) -> DetectionResult:
        """That of all batches since the last call, on every rank of `data_group`, which is for CPU tensors.
        Collective."""
        totals = data_group.all_reduce_(torch.stack(self._noted).sum(0).cpu())
        self._noted.clear()
        return DetectionResult.of(DetectionSums(*totals.tolist()))
