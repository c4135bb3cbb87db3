"""Scores of outputs against embedding rows: dot product, cosine, harmonic; with a fixed or learned temperature.

N outputs, D features, U candidates, E features of the operands of the matrix product; n, w: a part of the outputs and
candidates.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

TemperatureScaling = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Score(ABC):
    """`scale * similarity(transform_outputs(h) . transform_rows(e))` of an output h and a candidate's row e."""

    temperature: float | TemperatureScaling = 1.0
    """Scores are divided by it; a learned temperature divides the transformed outputs."""

    is_linear: ClassVar[bool] = True
    """Whether the similarity is the matmul's result itself."""

    @property
    def scale(self) -> float:
        """Factor of the similarities."""
        return 1 / self.temperature if isinstance(self.temperature, float | int) else 1.0

    def transform_outputs(self, outputs_ND: Tensor) -> Tensor:
        """[N, E]: the left operand of the matrix product; differentiable."""
        return outputs_ND if isinstance(self.temperature, float | int) else self.temperature(outputs_ND)

    def transform_rows(self, rows_UD: Tensor) -> Tensor:
        """[U, E]: the right operand of the matrix product, of the candidates' rows; differentiable."""
        return rows_UD

    def to_similarity_(self, products_nw: Tensor) -> Tensor | None:
        """Converts products to similarities in place; returns the derivatives of the similarities w.r.t. the products,
        None if these are all 1."""
        return None

    @abstractmethod
    def reference_scores(self, outputs_ND: Tensor, rows_UD: Tensor) -> Tensor:
        """[N, U]: the scores by their definition, for a fixed temperature."""


@dataclass(frozen=True)
class Cosine(Score):
    """`cos(h, e) / T`, as in SimCLR (Chen et al. 2020, arXiv 2002.05709)."""

    def transform_outputs(self, outputs_ND: Tensor) -> Tensor:
        return super().transform_outputs(_normalize(outputs_ND))

    def transform_rows(self, rows_UD: Tensor) -> Tensor:
        return _normalize(rows_UD)

    def reference_scores(self, outputs_ND: Tensor, rows_UD: Tensor) -> Tensor:
        return F.cosine_similarity(outputs_ND[:, None], rows_UD, dim=-1) * self.scale


def _normalize(vectors_ND: Tensor) -> Tensor:
    """Of length 1; vectors of 0 remain (in fp16 torch's own least length, 1e-12, is 0)."""
    return F.normalize(vectors_ND, dim=-1, eps=1e-6 if vectors_ND.dtype == torch.float16 else 1e-12)


@dataclass(frozen=True)
class Dot(Score):
    """`h . e / T`."""

    def reference_scores(self, outputs_ND: Tensor, rows_UD: Tensor) -> Tensor:
        return outputs_ND @ rows_UD.T * self.scale


# The harmonic score: probabilities fall with a power of the distance, and do not change with the scale of the vectors.
#
# Harmonic loss: Baek, Liu, Tyagi, Tegmark 2025, arXiv 2502.01628: p ~ 1 / d^n, so that log p = -n log d + constant; n
# is 1 / temperature (in the paper n = sqrt(D)).


MIN_SQUARED_DISTANCE = 1e-3
"""Smaller squared distances are clamped to this, and have no gradient: where |h|^2 is in the hundreds, the float32
error of |h|^2 + |e|^2 - 2 h.e is some 1e-4."""


@dataclass(frozen=True)
class Harmonic(Score):
    """`-log |h - e| / T`. Two further features make the squared distance a product: (-2 h, |h|^2, 1) . (e, 1, |e|^2).

    Computed in float32 or float64.
    """

    is_linear: ClassVar[bool] = False

    @property
    def scale(self) -> float:
        """Factor of log d^2, hence one half."""
        return -super().scale / 2

    def transform_outputs(self, outputs_ND: Tensor) -> Tensor:
        if not isinstance(self.temperature, float | int):
            raise TypeError("a harmonic score has a fixed temperature")  # a learned one divides outputs, not scores
        outputs_ND = _at_least_float32(outputs_ND)
        squares_N1 = outputs_ND.square().sum(dim=-1, keepdim=True)
        return torch.cat([-2 * outputs_ND, squares_N1, torch.ones_like(squares_N1)], dim=-1)

    def transform_rows(self, rows_UD: Tensor) -> Tensor:
        rows_UD = _at_least_float32(rows_UD)
        squares_U1 = rows_UD.square().sum(dim=-1, keepdim=True)
        return torch.cat([rows_UD, torch.ones_like(squares_U1), squares_U1], dim=-1)

    def to_similarity_(self, products_nw: Tensor) -> Tensor:
        is_clamped_nw = products_nw < MIN_SQUARED_DISTANCE
        derivatives_nw = products_nw.clamp_min_(MIN_SQUARED_DISTANCE).reciprocal().masked_fill_(is_clamped_nw, 0)
        products_nw.log_()
        return derivatives_nw

    def reference_scores(self, outputs_ND: Tensor, rows_UD: Tensor) -> Tensor:
        squares_NU = (outputs_ND[:, None] - rows_UD).square().sum(dim=-1)
        return squares_NU.clamp_min(MIN_SQUARED_DISTANCE).log() * self.scale


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


SCORES: Mapping[str, type[Score]] = {"dot": Dot, "cosine": Cosine, "harmonic": Harmonic}
"""By the setting `objective.score`."""


class LearnedTemperature(nn.Module):
    """A positive scalar, learned as its logarithm, so that updates are relative and it stays positive."""

    def __init__(self, initial_temperature: float) -> None:
        super().__init__()
        self._initial_temperature = initial_temperature
        self.log_value = nn.Parameter(torch.empty(1))
        """float [1]; like all vectors it has no weight decay."""

    def initial_value(self) -> Tensor:
        """The initial value of `log_value`."""
        return torch.tensor([math.log(self._initial_temperature)])

    def forward(self, outputs_ND: Tensor) -> Tensor:
        """The outputs divided by the temperature, which divides their scores."""
        return outputs_ND * torch.exp(-self.log_value).to(outputs_ND.dtype)
