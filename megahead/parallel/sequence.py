"""Sequence parallelism: between the split layers of a block, each tensor rank has a share of every row's tokens.

Norms, dropout and the residual stream, which with tensor parallelism alone every rank computes and keeps in full, are
split along the tokens. An all-gather before a column layer and a reduce-scatter after a row layer replace the
all-reduces, and send as many bytes. After Korthikanti et al. 2022, arXiv 2205.05198.

B rows, T tokens, t of one rank, D hidden size, f features of one rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megahead.distributed import Group, copy_to_group, reduce_scatter_to_group
from megahead.nn import HeadsLinear, LayerNorm, RMSNorm, layer_norm
from megahead.parallel.layers import (
    TWINS,
    ColumnParallelLinear,
    RowParallelLinear,
    SharedHeadsLinear,
    SharedRMSNorm,
    Twins,
    unchanged,
)


class SequenceColumnLinear(ColumnParallelLinear):
    """Reads this rank's tokens, returns this rank's features of all tokens.

    Costs an all-gather of [B, T, D] forward; backward another one (so that only [B, t, D] is kept) and a
    reduce-scatter.
    """

    def forward(self, x_BtD: Tensor) -> Tensor:
        """[B, T, f]: this rank's output features."""
        inputs = _in_autocast_type(x_BtD, *self.own())
        output_BTf: Tensor = _GatheredLinear.apply(*inputs, self.group)
        return output_BTf


class SequenceSharedHeadsLinear(SharedHeadsLinear, SequenceColumnLinear):
    """The same with fewer heads than ranks."""


class SequenceRowLinear(RowParallelLinear):
    """Reads this rank's features of all tokens, returns this rank's tokens: a reduce-scatter forward, an all-gather
    backward."""

    def forward(self, x_BTf: Tensor) -> Tensor:
        """[B, t, D]: this rank's tokens."""
        summed_BtD = reduce_scatter_to_group(F.linear(x_BTf, self.weight), self.group, dim=1)
        return summed_BtD if self.bias is None else summed_BtD + copy_to_group(self.bias, self.group)


class SequenceLayerNorm(nn.Module):
    """A norm of this rank's tokens; the gradients of its weights are summed over the ranks, whose copies stay equal.

    The sum is part of autograd, because DeepSpeed takes gradients as soon as they are computed.
    """

    def __init__(self, full: nn.LayerNorm, group: Group) -> None:
        super().__init__()
        self.group = group
        self.eps = full.eps
        self.weight, self.bias = full.weight, full.bias

    def forward(self, x_BtD: Tensor) -> Tensor:
        """[B, t, D]; an all-reduce of [2, D] backward, or of [1, D] without a bias."""
        own = (self.weight,) if self.bias is None else (self.weight, self.bias)
        weight, *bias = copy_to_group(torch.stack(own), self.group)
        return layer_norm(x_BtD, weight, bias[0] if bias else None, self.eps)


def _split_heads(full: HeadsLinear, group: Group) -> nn.Module:
    return SequenceColumnLinear(full, group) if full.heads % group.size == 0 else SequenceSharedHeadsLinear(full, group)


SEQUENCE_TWINS: Twins = {
    **TWINS,
    "column": {nn.Linear: SequenceColumnLinear},
    "key_heads": {HeadsLinear: _split_heads},
    "row": {nn.Linear: SequenceRowLinear},
    "norm": {
        LayerNorm: SequenceLayerNorm,
        nn.LayerNorm: SequenceLayerNorm,
        RMSNorm: SharedRMSNorm,
        nn.Identity: unchanged,
    },
}
"""The same as `TWINS`, if tokens are split too."""


class _GatheredLinear(torch.autograd.Function):
    """`linear` over all ranks' tokens; keeps only this rank's, and gathers the others again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x_BtD: Tensor, weight_fD: Tensor, bias_f: Tensor | None, group: Group) -> Tensor:
        ctx.group, ctx.has_bias = group, bias_f is not None
        ctx.save_for_backward(x_BtD, weight_fD)
        return F.linear(group.unshard(x_BtD, dim=1), weight_fD, bias_f)

    @staticmethod
    def backward(ctx: Any, grad_BTf: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:  # type: ignore[override]
        x_BtD, weight_fD = ctx.saved_tensors
        grad_Nf, x_ND = grad_BTf.flatten(0, 1), ctx.group.unshard(x_BtD, dim=1).flatten(0, 1)
        grad_BtD = ctx.group.reduce_scatter(grad_BTf @ weight_fD, dim=1)
        return grad_BtD, grad_Nf.T @ x_ND, grad_Nf.sum(0) if ctx.has_bias else None, None


def _in_autocast_type(x: Tensor, *parameters: Tensor | None) -> list[Tensor | None]:
    """The tensors in the type that autocast would give to `linear`; unchanged outside of autocast."""
    if not torch.is_autocast_enabled(x.device.type):
        return [x, *parameters]
    dtype = torch.get_autocast_dtype(x.device.type)
    return [None if tensor is None else tensor.to(dtype) for tensor in (x, *parameters)]
