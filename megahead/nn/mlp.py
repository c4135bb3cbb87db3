"""The position-wise MLP: up, an activation, down; or with a gate beside it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

Activation = Literal["gelu", "gelu_tanh", "silu"]

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


class MLP(nn.Module):
    """`down(gelu(up(x)))`; `gelu` by the error function, `gelu_tanh` by its tanh approximation."""

    def __init__(self, hidden_size: int, intermediate_size: int, activation: Activation) -> None:
        super().__init__()
        self.activation = _ACTIVATIONS[activation]
        self.up = nn.Linear(hidden_size, intermediate_size)
        self.down = nn.Linear(intermediate_size, hidden_size)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D] to [B, T, D]."""
        y_BTD: Tensor = self.down(self.activation(self.up(x_BTD)))
        return y_BTD


class GatedMLP(nn.Module):
    """`down(activation(gate(x)) * up(x))` (Shazeer 2020, arXiv 2002.05202): with `silu` SwiGLU, with `gelu` GeGLU."""

    def __init__(self, hidden_size: int, intermediate_size: int, activation: Activation, *, bias: bool) -> None:
        super().__init__()
        self.activation = _ACTIVATIONS[activation]
        self.gate = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D] to [B, T, D]."""
        y_BTD: Tensor = self.down(self.activation(self.gate(x_BTD)) * self.up(x_BTD))
        return y_BTD
