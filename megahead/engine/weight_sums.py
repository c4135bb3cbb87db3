"""Checksums over weights: equal on replicas, which hold the same bits, as long as no bit has flipped."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def weight_sums(weights: Iterable[Tensor]) -> Tensor:
    """int64 [P] on the CPU: each tensor's bits, read as whole numbers of its width and summed up. A flipped bit changes
    its sum; reads the weights once."""
    sums = [weight.detach().view(_WHOLE[weight.element_size()]).sum(dtype=torch.int64) for weight in weights]
    return torch.stack(sums).cpu()
