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


def sum_scatter(parts: Tensor, group: Group) -> Tensor:
    """[n, ...]: this rank's share of the sum of all ranks' [size * n, ...]; backward gathers."""
    share: Tensor = parts if group.size == 1 else _SumScatter.apply(parts, group)
    return share


def gather(share: Tensor, group: Group) -> Tensor:
    """[size * n, ...]: all ranks' [n, ...] in rank order, to be used apart; backward sums and scatters."""
    whole: Tensor = share if group.size == 1 else _Gather.apply(share, group)
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
    def forward(ctx: Any, parts: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.sum_scatter(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.group.gather(grad).flatten(0, 1), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.gather(share).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.group.sum_scatter(grad), None
