"""A learned softmax temperature: scores are divided by a parameter, which starts at a given number."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class LearnedTemperature(nn.Module):
    """A positive scalar, learned as its logarithm, so that updates are relative and it stays positive."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.start = start
        self.log_value = nn.Parameter(torch.empty(1))
        """float [1]; like all vectors it has no weight decay."""

    def first_value(self) -> Tensor:
        """The value that `log_value` starts from."""
        return torch.tensor([math.log(self.start)])

    def forward(self, outputs_ND: Tensor) -> Tensor:
        """The outputs divided by the temperature, which divides their scores too."""
        return outputs_ND * torch.exp(-self.log_value).to(outputs_ND.dtype)
