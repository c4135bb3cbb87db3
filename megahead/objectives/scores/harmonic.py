"""The harmonic score: probabilities fall with a power of the distance, and do not change with the scale of both sides.

Harmonic loss: Baek, Liu, Tyagi, Tegmark 2025, arXiv 2502.01628: p ~ 1 / d^n, so that log p = -n log d + constant; n is
the inverse of the temperature (the paper's is the root of D).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megahead.objectives.scores.score import Score

LEAST_SQUARE = 1e-3
"""Squared distances count as at least this: where |h|^2 is in the hundreds, float32 knows |h|^2 + |e|^2 - 2 h.e to
some 1e-4. Nearer ones have no slope, since they count all the same."""


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

    def link_(self, products_nw: Tensor) -> Tensor:
        nearer_nw = products_nw < LEAST_SQUARE
        slopes_nw = products_nw.clamp_min_(LEAST_SQUARE).reciprocal().masked_fill_(nearer_nw, 0)
        products_nw.log_()
        return slopes_nw

    def written_out(self, outputs_ND: Tensor, rows_UD: Tensor) -> Tensor:
        squares_NU = (outputs_ND[:, None] - rows_UD).square().sum(dim=-1)
        return squares_NU.clamp_min(LEAST_SQUARE).log() * self.scale


def _full(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
