"""The weights of a benchmark's model, and how a step updates them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn


class Weights(Protocol):
    """Between a model and its optimizer."""

    def add(self) -> None:
        """Adds a micro-batch's gradients to the step's."""
        ...

    def update(self, clipping: float) -> None:
        """Clips the step's gradients, updates the weights, and drops the gradients."""
        ...


class FullWeights:
    """float32."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._parameters, self._optimizer = list(model.parameters()), optimizer

    def add(self) -> None:
        """The backward pass did."""

    def update(self, clipping: float) -> None:
        nn.utils.clip_grad_norm_(self._parameters, clipping)
        self._optimizer.step()
        self._optimizer.zero_grad()


class HalfWeights:
    """bf16, which the optimizer has in float32, as they are at ZeRO 1 and higher: forward and backward read and write
    half as many bytes, and nothing is converted each time. A step's gradients are added up in float32."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._halves, self._optimizer = list(model.parameters()), optimizer
        full = {half: nn.Parameter(half.detach().clone()) for half in self._halves}
        for group in optimizer.param_groups:
            group["params"] = [full[half] for half in group["params"]]
        for half in self._halves:
            half.data = half.data.bfloat16()
        self._full = list(full.values())

    def add(self) -> None:
        for full, half in zip(self._full, self._halves, strict=True):
            if half.grad is not None:
                full.grad = half.grad.float() if full.grad is None else full.grad.add_(half.grad)
                half.grad = None

    def update(self, clipping: float) -> None:
        nn.utils.clip_grad_norm_(self._full, clipping)
        self._optimizer.step()
        self._optimizer.zero_grad()
        torch._foreach_copy_([half.data for half in self._halves], [full.data for full in self._full])


def weights_of(model: nn.Module, optimizer: torch.optim.Optimizer, precision: str) -> Weights:
    """As the engine has them at ZeRO 1 and higher."""
    return HalfWeights(model, optimizer) if precision == "bf16" else FullWeights(model, optimizer)
