"""The weights of a benchmark's model, and how a step updates them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import nn


class Weights(Protocol):
    """Between a model and its optimizer."""

    def computing(self) -> AbstractContextManager[object]:
        """Around the forward pass."""
        ...

    def update(self, clipping: float) -> None:
        """Clips the gradients, updates the weights, and drops the gradients."""
        ...


class FullWeights:
    """float32; in bf16 the forward pass is under autocast, as it is at ZeRO 0."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, half: bool) -> None:
        self._parameters, self._optimizer = list(model.parameters()), optimizer
        self._device, self._half = device.type, half

    def computing(self) -> AbstractContextManager[object]:
        return torch.autocast(self._device, torch.bfloat16) if self._half else nullcontext()

    def update(self, clipping: float) -> None:
        nn.utils.clip_grad_norm_(self._parameters, clipping)
        self._optimizer.step()
        self._optimizer.zero_grad()


class HalfWeights:
    """bf16, which the optimizer has in float32, as they are at ZeRO 1 and higher: forward and backward read and write
    half as many bytes, and nothing is converted each time."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._halves, self._optimizer = list(model.parameters()), optimizer
        full = {half: nn.Parameter(half.detach().clone()) for half in self._halves}
        for group in optimizer.param_groups:
            group["params"] = [full[half] for half in group["params"]]
        for half in self._halves:
            half.data = half.data.bfloat16()
        self._full = list(full.values())

    def computing(self) -> AbstractContextManager[object]:
        return nullcontext()

    def update(self, clipping: float) -> None:
        for full, half in zip(self._full, self._halves, strict=True):
            full.grad = None if half.grad is None else half.grad.float()
            half.grad = None
        nn.utils.clip_grad_norm_(self._full, clipping)
        self._optimizer.step()
        self._optimizer.zero_grad()
        torch._foreach_copy_([half.data for half in self._halves], [full.data for full in self._full])


def weights_of(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, precision: str) -> Weights:
    """As the engine has them on a GPU; on a CPU always float32."""
    if device.type == "cuda" and precision == "bf16":
        return HalfWeights(model, optimizer)
    return FullWeights(model, optimizer, device, half=precision == "bf16")
