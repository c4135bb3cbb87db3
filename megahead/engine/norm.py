"""The global gradient norm and clipping at ZeRO stage 0.

DeepSpeed's own clipping there does not return the norm, and applies a step whose gradients are not finite.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from megahead.distributed import Group


def global_norm(parameters: Iterable[nn.Parameter], tensor_group: Group) -> Tensor:
    """L2 norm of all gradients, each counted once over the tensor ranks; [] on their device. One collective, and the
    host does not wait.

    Parameters that carry `model_parallel = True` are slices whose squares add up; others are copies.
    """
    slices: list[Tensor] = []
    copies: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is not None:
            (slices if getattr(parameter, "model_parallel", False) else copies).append(parameter.grad)
    counted = slices + copies if tensor_group.rank == 0 else slices
    squared = get_total_norm(counted).square() if counted else torch.zeros(())
    return tensor_group.all_reduce_(squared).sqrt()


def clip_(parameters: Iterable[nn.Parameter], norm: float, largest: float) -> None:
    """Scales all gradients in place so that their global norm `norm` becomes at most `largest` (0: no limit)."""
    if 0 < largest < norm:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        torch._foreach_mul_(gradients, largest / (norm + 1e-6))
