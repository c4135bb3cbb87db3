"""The rows of one step on one rank: looked up in its forward passes, their gradients gathered in the backward passes.

U rows fetched, O rows that this rank owns and any rank asks for, D features. *Places* are indices into the U rows.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megahead.distributed import Mesh
from megahead.optim import Rows
from megahead.table.exchange import gradients_to_owners, rows_from_owners
from megahead.table.owned import WEIGHT
from megahead.table.plan import RowPlan


class FetchedRows:
    """What came from the owners, and what will go back to them once the step's last backward pass is done."""

    def __init__(self, plan: RowPlan, served: Rows, mesh: Mesh, dtype: torch.dtype) -> None:
        """`plan`: which rows this rank asks of others and they of it, and how many forward passes the step has;
        `served`: the O rows, up to date; `dtype`: of looked-up rows. Collective."""
        self.served = served
        self.sums_OD: Tensor | None = None
        """Gradients of `served`, over all micro-batches and ranks, on average over data ranks."""
        self._plan, self._mesh = plan.to(served[WEIGHT].device), mesh
        self._rows_UD = rows_from_owners(served[WEIGHT], self._plan, mesh.world_group).to(dtype)
        self._gradients_UD: Tensor | None = None
        self._lookups_left = plan.num_lookups

    def look_up(self, ids: Tensor, ballast: Tensor, num_duplicates: int = 0) -> Tensor:
        """[..., D]: the rows of `ids`, among those fetched. Gradients of the first `num_duplicates` ids are not counted
        here, since another rank has the same ones and counts them."""
        places = torch.searchsorted(self._plan.ids_U, ids)
        looked_up: Tensor = _LookUp.apply(ballast, self, places, num_duplicates)
        return looked_up

    def rows_at(self, places: Tensor) -> Tensor:
        return F.embedding(places, self._rows_UD)

    def add_gradients(self, places: Tensor, gradients: Tensor) -> Tensor | None:
        """Of one backward pass; after the last one the norm of all rows' gradients together. Collective then."""
        added_UD = torch.ops.aten.embedding_dense_backward(
            gradients.float(), places, len(self._rows_UD), padding_idx=-1, scale_grad_by_freq=False
        )
        self._gradients_UD = added_UD if self._gradients_UD is None else self._gradients_UD.add_(added_UD)
        self._lookups_left -= 1
        return None if self._lookups_left else self._complete(self._gradients_UD)

    def _complete(self, gradients_UD: Tensor) -> Tensor:
        world = self._mesh.world_group
        self.sums_OD = gradients_to_owners(gradients_UD, self._plan, world).div_(self._mesh.data_group.size)
        self._gradients_UD = None
        return world.all_gather(self.sums_OD.norm(dtype=torch.float64).square()).sum().sqrt()


class _LookUp(torch.autograd.Function):
    """Hands gradients to `fetched`; the ballast's gradient is 0, but in the last backward pass has the norm of all
    rows' gradients together."""

    @staticmethod
    def forward(ctx: Any, ballast: Tensor, fetched: FetchedRows, places: Tensor, num_duplicates: int) -> Tensor:
        ctx.save_for_backward(places)
        ctx.fetched, ctx.num_duplicates, ctx.zeros = fetched, num_duplicates, torch.zeros_like(ballast)
        return fetched.rows_at(places)

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (places,) = ctx.saved_tensors
        counted = gradients.reshape(-1, gradients.shape[-1])[ctx.num_duplicates :]
        norm = ctx.fetched.add_gradients(places.flatten()[ctx.num_duplicates :], counted)
        return ctx.zeros if norm is None else vector_of_norm(norm, ctx.zeros), None, None, None


def vector_of_norm(norm: Tensor, like: Tensor) -> Tensor:
    """A tensor of positive numbers, of the shape and dtype of `like`, whose L2 norm is `norm` within a relative 1e-5.

    In half precision some are rounded up and the others down, in the shares that leave the sum as it is.
    """
    limits, count = torch.finfo(like.dtype), like.numel()
    each = norm.double() / math.sqrt(count)
    spacing = (limits.eps * torch.exp2(torch.frexp(each).exponent - 1.0)).clamp_min(limits.smallest_normal * limits.eps)
    shares = (torch.arange(count, device=like.device, dtype=torch.float64) + 0.5) / count
    return (torch.floor(each / spacing + shares) * spacing).to(like.dtype).view_as(like)
