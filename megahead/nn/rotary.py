"""Rotary positions (Su et al. 2021, arXiv 2104.09864) on the first r dimensions of each head.

Dimension i and its partner i + r/2 (the "rotate-half" pairing) turn by position * base^(-2i/r). The tables are made
once per forward pass, in fp32, and shared by all blocks; nothing is stored in the model. For longer rows than a model
was first trained on its frequencies may be scaled.
B rows, T tokens, H heads, d dimensions of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megahead.nn.target_positions import TargetPositions


class Rotation(NamedTuple):
    """Tables that broadcast against [B, T, H, r], fp32."""

    cos: Tensor
    sin: Tensor
    """Negated in the first half, where the partner is subtracted."""

    def at(self, targets: TargetPositions) -> Rotation:
        """Tables that broadcast against [N, H, r], of the targets alone."""
        return Rotation(targets.take(self.cos), targets.take(self.sin))


Scaling = Callable[[Tensor], Tensor]
"""From the frequencies [r/2] of a base to those that a model turns by."""


def rotary_at(positions: Tensor, dims: int, base: float, scaling: Scaling | None = None) -> Rotation:
    """Tables for `positions` ([B, T], or [1, T] if the same in all rows) and the first `dims` dimensions of a head."""
    frequencies = base ** -(torch.arange(0, dims, 2, device=positions.device, dtype=torch.float32) / dims)
    if scaling is not None:
        frequencies = scaling(frequencies)
    angles = (positions[..., None].float() * frequencies).unsqueeze(-2)
    cos, sin = angles.cos(), angles.sin()
    return Rotation(torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1))


def apply_rotary(x_BTHd: Tensor, rotation: Rotation) -> Tensor:
    """`x_BTHd` turned by its positions, in its own dtype; dimensions beyond the tables pass through."""
    dims = rotation.cos.shape[-1]
    if dims == x_BTHd.shape[-1]:
        return _turned(x_BTHd, rotation)
    turning, passing = x_BTHd.split([dims, x_BTHd.shape[-1] - dims], -1)
    return torch.cat([_turned(turning, rotation), passing], -1)


def _turned(x_BTHr: Tensor, rotation: Rotation) -> Tensor:
    """In the wider of both formats: a CPU multiplies two of differing formats several times as slowly."""
    wide_BTHr = x_BTHr.to(torch.promote_types(x_BTHr.dtype, rotation.cos.dtype))
    partner_BTHr = wide_BTHr.roll(wide_BTHr.shape[-1] // 2, -1)
    return (wide_BTHr * rotation.cos + partner_BTHr * rotation.sin).to(x_BTHr.dtype)


def scaled_linearly(frequencies: Tensor, factor: float) -> Tensor:
    """Positions count `factor` times less (position interpolation, Chen et al. 2023, arXiv 2306.15595)."""
    return frequencies / factor


def scaled_as_llama3(frequencies: Tensor, factor: float, low: float, high: float, positions: int) -> Tensor:
    """Llama 3.1's way: what turns less than `low` times in `positions` tokens turns `factor` times slower.

    What turns more than `high` times stays; between them the two are mixed.
    """
    turns = positions * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / factor)
