"""The position-wise MLP: up, GELU, down."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

Activation = Literal["gelu", "gelu_tanh"]


class MLP(nn.Module):
    """`down(gelu(up(x)))`; `gelu` by the error function, `gelu_tanh` by its tanh approximation."""

    def __init__(self, hidden_size: int, intermediate_size: int, activation: Activation) -> None:
        super().__init__()
        self.approximate = "tanh" if activation == "gelu_tanh" else "none"
        self.up = nn.Linear(hidden_size, intermediate_size)
        self.down = nn.Linear(intermediate_size, hidden_size)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D] to [B, T, D]."""
        y_BTD: Tensor = self.down(F.gelu(self.up(x_BTD), approximate=self.approximate))
        return y_BTD
