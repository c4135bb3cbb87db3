"""Layers: MLPs, norms, the embedding, rotary position embeddings."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megahead.config.model import ModelConfig, RotaryScalingConfig
from megahead.distributed.group import Group, per_rank_rng
from megahead.models.documents import TargetPositions

Activation = Literal["gelu", "gelu_tanh", "silu"]

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


class MLP(nn.Module):
    """`down(activation(up(x)))`, or `gated` (Shazeer 2020, arXiv 2002.05202) `down(activation(gate(x)) * up(x))`: with
    `silu` SwiGLU, with `gelu` GeGLU. `gelu` is by the error function, `gelu_tanh` by its tanh approximation."""

    def __init__(
        self, hidden_size: int, mlp_size: int, activation: Activation, *, gated: bool = False, bias: bool = True
    ) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.gate = nn.Linear(hidden_size, mlp_size, bias) if gated else None
        self.up = nn.Linear(hidden_size, mlp_size, bias)
        self.down = nn.Linear(mlp_size, hidden_size, bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D] to [B, T, D]."""
        if self.gate is None:
            hidden_BTF = self.activation(self.up(x_BTD))
        else:
            hidden_BTF = self.activation(self.gate(x_BTD)) * self.up(x_BTD)
        y_BTD: Tensor = self.down(hidden_BTF)
        return y_BTD


def dropout(x: Tensor, rate: float, group: Group, training: bool) -> Tensor:
    """`x` after dropout if `training`, with different masks on each rank of `group`."""
    if not training or rate == 0.0:
        return x
    with per_rank_rng(group, x.device):
        return F.dropout(x, rate)


# Layer normalization (Ba et al. 2016, arXiv 1607.06450).


class LayerNorm(nn.LayerNorm):
    """`weight * (x - mean(x)) / sqrt(var(x) + eps) + bias` over the last dimension; the bias may be None."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., D], in the dtype of `x`."""
        return layer_norm(x, self.weight, self.bias, self.eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """`x` [..., D] normed, in its dtype. Half precision on CPUs is normed in fp32, since torch sums the gradients of
    weight and bias in the dtype of `x`: an error of up to a third for 4,096 tokens with gradients of one sign."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    if x.device.type != "cpu" or dtype == x.dtype:
        return F.layer_norm(x, weight.shape, weight, bias, eps).to(x.dtype)  # autocast on CUDA returns fp32
    bias = None if bias is None else bias.to(dtype)
    return F.layer_norm(x.to(dtype), weight.shape, weight.to(dtype), bias, eps).to(x.dtype)


# Root mean square normalization (Zhang & Sennrich 2019, arXiv 1910.07467).


class RMSNorm(nn.RMSNorm):
    """`weight * x / sqrt(mean(x^2) + eps)` over the last dimension; `zero_centered`: with `1 + weight` (Gemma)."""

    eps: float

    def __init__(self, size: int, eps: float, *, zero_centered: bool = False) -> None:
        super().__init__(size, eps=eps)
        self.zero_centered = zero_centered

    def forward(self, x: Tensor) -> Tensor:
        """[..., D], in the dtype of `x`."""
        return rms_norm(x, self.weight, self.eps, self.zero_centered)


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, zero_centered: bool) -> Tensor:
    """`x` [..., D] normed, in its dtype, also under autocast, which leaves the weight in fp32 and on CUDA returns fp32.
    `zero_centered` norms compute in fp32, since in bf16 small weights would be lost in `1 + weight`."""
    if not zero_centered:
        return F.rms_norm(x, weight_D.shape, weight_D.to(x.dtype), eps).to(x.dtype)
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(wide), weight_D.shape, 1 + weight_D.to(wide), eps).to(x.dtype)


def build_norm(config: ModelConfig, size: int | None = None) -> LayerNorm | RMSNorm:
    """The family's norm over `size` features, by default those of hidden states."""
    size = size or config.hidden_size
    if config.has_rms_norm():
        return RMSNorm(size, config.norm_eps, zero_centered=config.has_zero_centered_norms())
    return LayerNorm(size, eps=config.norm_eps, bias=config.has_norm_bias())


class Embedding(nn.Embedding):
    """`nn.Embedding` with the lookup of `look_up`."""

    def forward(self, ids: Tensor) -> Tensor:
        """[..., D]: the embeddings of `ids`, of any shape."""
        return look_up(ids, self.weight)


def look_up(ids: Tensor, weight_VD: Tensor) -> Tensor:
    """[..., D]: rows of `weight_VD`, with a dense gradient. Half precision on CPUs uses `index_select`, which sums the
    gradients of an id in fp32; `F.embedding` sums them in half precision, where a sum stops growing after some hundred
    occurrences."""
    if weight_VD.device.type != "cpu" or weight_VD.dtype not in (torch.bfloat16, torch.float16):
        return F.embedding(ids, weight_VD)
    return weight_VD.index_select(0, ids.flatten()).view(*ids.shape, -1)


# Rotary positions (Su et al. 2021, arXiv 2104.09864) on the first r dimensions of each head.
#
# Dimensions i and i + r/2 (the "rotate-half" pairing) are rotated by position * base^(-2i/r). The tables are computed
# once per forward pass, in fp32, and shared by all blocks, without buffers in the model. For longer rows than in a
# model's first training its frequencies may be scaled. B rows, T tokens, H heads, d dimensions of a head.


class Rotation(NamedTuple):
    """Tables that broadcast against [B, T, H, r], fp32."""

    cos: Tensor
    sin: Tensor
    """Negated in the first half, as in rotate-half."""

    def over_query_and_key(self) -> Rotation:
        """The same tables, which broadcast against [B, T, H, 2, r]: a query and a key of each head."""
        return Rotation(self.cos.unsqueeze(-2), self.sin.unsqueeze(-2))

    def select(self, targets: TargetPositions) -> Rotation:
        """The targets' tables, which broadcast against [N, H, r]."""
        return Rotation(targets.select(self.cos), targets.select(self.sin))


def rotary_tables(positions: Tensor, dims: int, base: float, scaling: RotaryScalingConfig | None = None) -> Rotation:
    """Tables for `positions` ([B, T], or [1, T] if the same in all rows) and the first `dims` dimensions of a head."""
    frequencies = base ** -(torch.arange(0, dims, 2, device=positions.device, dtype=torch.float32) / dims)
    if scaling is not None:
        frequencies = scale_frequencies(frequencies, scaling)
    angles = (positions[..., None].float() * frequencies).unsqueeze(-2)
    cos, sin = angles.cos(), angles.sin()
    return Rotation(torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1))


def apply_rotary(x_BTHd: Tensor, rotation: Rotation) -> Tensor:
    """`x_BTHd` rotated by its positions, in its own dtype; dimensions beyond the tables are unchanged."""
    dims = rotation.cos.shape[-1]
    if dims == x_BTHd.shape[-1]:
        return _rotate(x_BTHd, rotation)
    rotary, unrotated = x_BTHd.split([dims, x_BTHd.shape[-1] - dims], -1)
    return torch.cat([_rotate(rotary, rotation), unrotated], -1)


def _rotate(x_BTHr: Tensor, rotation: Rotation) -> Tensor:
    """Computes in the wider of both dtypes: mixed dtypes are several times as slow on a CPU."""
    wide_BTHr = x_BTHr.to(torch.promote_types(x_BTHr.dtype, rotation.cos.dtype))
    swapped_BTHr = wide_BTHr.roll(wide_BTHr.shape[-1] // 2, -1)
    return (wide_BTHr * rotation.cos + swapped_BTHr * rotation.sin).to(x_BTHr.dtype)


def scale_frequencies(frequencies: Tensor, scaling: RotaryScalingConfig) -> Tensor:
    """The scaled frequencies [r/2]. `linear` is position interpolation (Chen et al. 2023, arXiv 2306.15595): divides
    all by `factor`. `llama3` is Llama 3.1's: divides those of less than `low_frequency_factor` rotations in
    `original_positions` tokens, keeps those of more than `high_frequency_factor`, and interpolates between them."""
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    rotations = scaling.original_positions * frequencies / (2 * math.pi)
    unscaled = ((rotations - low) / (high - low)).clamp(0, 1)
    return frequencies * (unscaled + (1 - unscaled) / scaling.factor)
