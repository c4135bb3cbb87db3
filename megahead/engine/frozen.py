"""Keeps fp32 values of frozen parameters, which DeepSpeed rounds to half precision and has no master copies of."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from megahead.distributed import Group


class FrozenWeights:
    """Frozen parameters in fp32, in the host's memory, partitioned over `data_group`; only checkpoints need them."""

    def __init__(self, data_group: Group, device: torch.device) -> None:
        self._data_group = data_group
        self._device = device
        self._kept: dict[nn.Parameter, tuple[Tensor, torch.Size]] = {}

    def keep(self, parameter: nn.Parameter, full: Tensor) -> None:
        """Stores this rank's slice of `full`, the full value of `parameter`. Sends nothing."""
        flat = functional.pad(full.detach().flatten().float(), (0, -full.numel() % self._data_group.size))
        self._kept[parameter] = self._data_group.shard(flat, 0).cpu(), full.shape

    def read(self, parameter: nn.Parameter) -> Tensor | None:
        """The full value that was stored, on the device; None if there is none. Collective."""
        if parameter not in self._kept:
            return None
        part, shape = self._kept[parameter]
        return self._data_group.unshard(part.to(self._device), 0)[: shape.numel()].view(shape)
