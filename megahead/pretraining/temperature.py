"""What scores are divided by: a number, or a parameter that starts at one."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class LearnedTemperature(nn.Module):
    """A positive scalar, learned as its logarithm: steps are relative to its size, and it stays positive."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.start = start
        self.log_value = nn.Parameter(torch.empty(1))
        """float [1]; like all vectors it does not decay."""

    def first_value(self) -> Tensor:
        """What `log_value` starts from."""
        return torch.tensor([math.log(self.start)])

    def forward(self, outputs_ND: Tensor) -> Tensor:
        """Outputs divided by the temperature, and with them all their scores."""
        return outputs_ND * torch.exp(-self.log_value).to(outputs_ND.dtype)
