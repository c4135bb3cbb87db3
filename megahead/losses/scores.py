"""How outputs are scored against rows: dot product, cosine, harmonic; with a temperature that may be learned.

N outputs, D features, U candidates, E features of what is multiplied; n, w: some of the outputs and candidates.
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
    """`scale * similarity(outputs(h) . rows(e))`."""

    temperature: float | TemperatureScaling = 1.0
    """Scores are divided by it; a learned one divides what is made of outputs."""

    is_product: ClassVar[bool] = True
    """Whether a product is the similarity itself."""

    @property
    def scale(self) -> float:
        """Factor of the similarities."""
        return 1 / self.temperature if isinstance(self.temperature, float | int) else 1.0

    def outputs(self, outputs_ND: Tensor) -> Tensor:
        """[N, E]: what products read of the outputs; with a gradient."""
        return outputs_ND if isinstance(self.temperature, float | int) else self.temperature(outputs_ND)

    def rows(self, rows_UD: Tensor) -> Tensor:
        """[U, E]: what products read of the candidates' rows; with a gradient."""
        return rows_UD

    def similarity_(self, products_nw: Tensor) -> Tensor | None:
        """Puts similarities in place of the products; returns their derivatives by these, or None for ones."""
        return None

    @abstractmethod
    def reference(self, outputs_ND: Tensor, rows_UD: Tensor) -> Tensor:
        """[N, U]: the scores by their definition, for a fixed temperature; the reference."""


@dataclass(frozen=True)
class Cosine(Score):
    """`cos(h, e) / T`, as contrastive learning has it (SimCLR: Chen et al. 2020, arXiv 2002.05709)."""

    def outputs(self, outputs_ND: Tensor) -> Tensor:
        return super().outputs(F.normalize(outputs_ND, dim=-1))

    def rows(self, rows_UD: Tensor) -> Tensor:
        return F.normalize(rows_UD, dim=-1)

    def reference(self, outputs_ND: Tensor, rows_UD: Tensor) -> Tensor:
        return F.cosine_similarity(outputs_ND[:, None], rows_UD, dim=-1) * self.scale


@dataclass(frozen=True)
class Dot(Score):
    """`h . e / T`."""

    def reference(self, outputs_ND: Tensor, rows_UD: Tensor) -> Tensor:
        return outputs_ND @ rows_UD.T * self.scale


# The harmonic score: probabilities fall with a power of the distance, and do not change with the scale of both sides.
#
# Harmonic loss: Baek, Liu, Tyagi, Tegmark 2025, arXiv 2502.01628: p ~ 1 / d^n, so that log p = -n log d + constant; n
# is the inverse of the temperature (the paper's is the root of D).


MIN_SQUARED_DISTANCE = 1e-3
"""Squared distances count as at least this: where |h|^2 is in the hundreds, float32 knows |h|^2 + |e|^2 - 2 h.e to
some 1e-4. Nearer ones have no gradient, since they count all the same."""


@dataclass(frozen=True)
class Harmonic(Score):
    """`-log |h - e| / T`. With two features more the squared distance is a product: (-2 h, |h|^2, 1) . (e, 1, |e|^2).

    Computed in float32 at least.
    """

    is_product: ClassVar[bool] = False

    @property
    def scale(self) -> float:
        """Of log d^2, hence one half."""
        return -super().scale / 2

    def outputs(self, outputs_ND: Tensor) -> Tensor:
        """A temperature that is learned would have to divide scores, which are no products."""
        if not isinstance(self.temperature, float | int):
            raise TypeError("a harmonic score has a fixed temperature")
        outputs_ND = _full(outputs_ND)
        squares_N1 = outputs_ND.square().sum(dim=-1, keepdim=True)
        return torch.cat([-2 * outputs_ND, squares_N1, torch.ones_like(squares_N1)], dim=-1)

    def rows(self, rows_UD: Tensor) -> Tensor:
        rows_UD = _full(rows_UD)
        squares_U1 = rows_UD.square().sum(dim=-1, keepdim=True)
        return torch.cat([rows_UD, torch.ones_like(squares_U1), squares_U1], dim=-1)

    def similarity_(self, products_nw: Tensor) -> Tensor:
        nearer_nw = products_nw < MIN_SQUARED_DISTANCE
        derivatives_nw = products_nw.clamp_min_(MIN_SQUARED_DISTANCE).reciprocal().masked_fill_(nearer_nw, 0)
        products_nw.log_()
        return derivatives_nw

    def reference(self, outputs_ND: Tensor, rows_UD: Tensor) -> Tensor:
        squares_NU = (outputs_ND[:, None] - rows_UD).square().sum(dim=-1)
        return squares_NU.clamp_min(MIN_SQUARED_DISTANCE).log() * self.scale


def _full(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


# A learned temperature, and the similarities by name.


SCORES: Mapping[str, type[Score]] = {"dot": Dot, "cosine": Cosine, "harmonic": Harmonic}
"""By `objective.score`."""


class LearnedTemperature(nn.Module):
    """A positive scalar, learned as its logarithm, so that updates are relative and it stays positive."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.start = start
        self.log_value = nn.Parameter(torch.empty(1))
        """float [1]; like all vectors it has no weight decay."""

    def initial_value(self) -> Tensor:
        """The value that `log_value` starts from."""
        return torch.tensor([math.log(self.start)])

    def forward(self, outputs_ND: Tensor) -> Tensor:
        """The outputs divided by the temperature, which divides their scores too."""
        return outputs_ND * torch.exp(-self.log_value).to(outputs_ND.dtype)
