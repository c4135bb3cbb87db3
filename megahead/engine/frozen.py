"""Parameters that are not trained, as they came: DeepSpeed rounds them to half precision, and keeps no masters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from megahead.distributed import Group


class FrozenWeights:
    """fp32, cut over the ranks of `data_group`, in the host's memory: only checkpoints ask for them."""

    def __init__(self, data_group: Group, device: torch.device) -> None:
        self._data_group = data_group
        self._device = device
        self._kept: dict[nn.Parameter, tuple[Tensor, torch.Size]] = {}

    def keep(self, parameter: nn.Parameter, whole: Tensor) -> None:
        """Remembers the rank's slice of `whole`, the value of `parameter`. Sends nothing."""
        flat = functional.pad(whole.detach().flatten().float(), (0, -whole.numel() % self._data_group.size))
        self._kept[parameter] = self._data_group.shard(flat, 0).cpu(), whole.shape

    def read(self, parameter: nn.Parameter) -> Tensor | None:
        """What was kept, whole on the device; None where nothing was. Collective."""
        if parameter not in self._kept:
            return None
        part, shape = self._kept[parameter]
        return self._data_group.unshard(part.to(self._device), 0)[: shape.numel()].view(shape)
