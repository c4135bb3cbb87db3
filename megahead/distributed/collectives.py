"""Collectives that autograd sees through, named after what they do and in which direction they do it.

Two conventions make them short. A value that every rank of a group holds alike has a gradient that every rank holds
alike; and the scalar that backward starts from is one and the same on all of them. At one rank each is the identity.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megahead.distributed.group import Group


def sum_forward(part: Tensor, group: Group) -> Tensor:
    """The sum of all ranks' parts, on every rank; backward sends nothing. Ends a region where ranks compute apart."""
    summed: Tensor = part if group.size == 1 else _SumForward.apply(part, group)
    return summed


def sum_backward(same: Tensor, group: Group) -> Tensor:
    """`same` as it is; backward sums its gradient over the ranks. Begins a region where ranks compute apart."""
    given: Tensor = same if group.size == 1 else _SumBackward.apply(same, group)
    return given


def sum_scatter(parts: Tensor, group: Group, dim: int = 0) -> Tensor:
    """This rank's slice along `dim` of the sum of all ranks' parts; backward gathers."""
    share: Tensor = parts if group.size == 1 else _SumScatter.apply(parts, group, dim)
    return share


def split(same: Tensor, group: Group, dim: int) -> Tensor:
    """This rank's slice along `dim` of what all hold; backward gathers. Begins a region where ranks hold slices."""
    share: Tensor = same if group.size == 1 else _Split.apply(same, group, dim)
    return share


def join(share: Tensor, group: Group, dim: int) -> Tensor:
    """All ranks' slices along `dim`, on every rank, to be used alike; backward sends nothing. Inverse of `split`."""
    whole: Tensor = share if group.size == 1 else _Join.apply(share, group, dim)
    return whole


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Group) -> Tensor:
        return group.sum_(part.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, same: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return same.view_as(same)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.group.sum_(grad.clone(memory_format=torch.contiguous_format)), None


class _SumScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return group.sum_scatter(parts, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.group.join(grad, ctx.dim), None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, same: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return group.shard(same, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.group.join(grad, ctx.dim), None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return group.join(share, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.group.shard(grad, ctx.dim), None, None
