"""Collectives with gradients, named after what the forward pass does.

Two conventions make them short: a value that is equal on every rank of a group has a gradient that is equal on every
rank, and the scalar on which backward is called is equal on all. With one rank each of them is the identity.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megahead.distributed.group import Group


def reduce_from_group(part: Tensor, group: Group) -> Tensor:
    """The sum of all ranks' parts, on every rank; backward sends nothing. Ends a tensor-parallel region."""
    summed: Tensor = part if group.size == 1 else _ReduceFromGroup.apply(part, group)
    return summed


def copy_to_group(same: Tensor, group: Group) -> Tensor:
    """`same`, unchanged; backward sums its gradient over the ranks. Begins a tensor-parallel region."""
    given: Tensor = same if group.size == 1 else _CopyToGroup.apply(same, group)
    return given


def reduce_scatter_to_group(parts: Tensor, group: Group, dim: int = 0) -> Tensor:
    """This rank's slice along `dim` of the sum of all ranks' parts; backward gathers."""
    share: Tensor = parts if group.size == 1 else _ReduceScatterToGroup.apply(parts, group, dim)
    return share


def scatter_to_group(same: Tensor, group: Group, dim: int) -> Tensor:
    """This rank's slice along `dim` of what all ranks have; backward gathers. Begins a sequence-parallel region."""
    share: Tensor = same if group.size == 1 else _ScatterToGroup.apply(same, group, dim)
    return share


def gather_from_group(share: Tensor, group: Group, dim: int) -> Tensor:
    """The whole tensor of which every rank has a slice along `dim`; all ranks must use it alike, since backward sends
    nothing. The inverse of `scatter_to_group`.
    """
    full: Tensor = share if group.size == 1 else _GatherFromGroup.apply(share, group, dim)
    return full


class _ReduceFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Group) -> Tensor:
        return group.all_reduce_(part.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, same: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return same.view_as(same)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.group.all_reduce_(grad.clone(memory_format=torch.contiguous_format)), None


class _ReduceScatterToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return group.reduce_scatter(parts, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.group.unshard(grad, ctx.dim), None, None


class _ScatterToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, same: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return group.shard(same, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.group.unshard(grad, ctx.dim), None, None


class _GatherFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return group.unshard(share, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.group.shard(grad, ctx.dim), None, None
