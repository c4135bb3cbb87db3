"""The sharded embedding: the exchange of its rows between ranks, and the module that replaces the embedding.

Rows are sharded round-robin: rank i mod R owns id i, at index i // R, so that frequent ids, which are adjacent in most
vocabularies, are distributed evenly. R ranks; n rows of this rank; U ids that this rank needs; u ids that it requests;
S rows that other ranks request from it (with repeats); O distinct rows among these; D features.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megahead.config.embedding import shards_embedding
from megahead.config.run import RunConfig
from megahead.distributed.group import Group, Mesh
from megahead.distributed.tensors import RoundRobinShard, TensorSource, fill_shard_, join_blocks
from megahead.errors import CheckpointError
from megahead.sharded_embedding.optimizer import LAST_STEP, LEARNING_RATES, ROW_OPTIMIZERS, WEIGHT, RowOptimizer, Rows

# The exchange of a step's rows, planned before the step.
#
# The T ranks of a tensor group need the same ids. Each requests every T-th, u = U / T, and gathers the others' rows.


@dataclass(frozen=True)
class RowPlan:
    """One rank's part in the exchange of rows of one step."""

    ids_U: Tensor
    """int64: the ids that this rank needs, increasing, without repeats."""

    tensor_group: Group
    """The T ranks that need the same ids. Rank t requests `ids_U[t::T]`."""

    owner_order_u: Tensor
    """int64: the permutation that sorts the requested ids by owning rank."""

    recv_counts: list[int]
    """The number of rows to receive from each rank."""

    send_counts: list[int]
    """The number of rows to send to each rank."""

    owned_O: Tensor
    """int64: indices of the rows of this rank that any rank requests; increasing, without repeats."""

    owned_index_S: Tensor
    """int64: for each row to send, ordered by rank, its index in `owned_O`."""

    num_passes: int
    """The step's number of forward passes; the last backward pass completes the row gradients."""

    def to(self, device: torch.device) -> RowPlan:
        """The same plan on `device`."""
        names = ("ids_U", "owner_order_u", "owned_O", "owned_index_S")
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in names})


def plan_rows(ids: Tensor, ranks: Group, num_passes: int = 1, tensor_group: Group | None = None) -> RowPlan:
    """The plan of a step that needs `ids` (int64 on the CPU, with repeats), equal on all ranks of `tensor_group`.

    Collective over `ranks`, which must be a group for CPU tensors (gloo): sends one count to each rank, then 4 bytes
    per id. No communication over `tensor_group`.
    """
    ids_U, tensor_group = torch.unique(ids), tensor_group or Group()
    requested_u = ids_U[tensor_group.rank :: tensor_group.size]
    owners_u = requested_u % ranks.size
    owner_order_u = torch.argsort(owners_u, stable=True)
    recv_counts = torch.bincount(owners_u, minlength=ranks.size)
    send_counts = ranks.all_to_all(recv_counts).tolist()
    sent_S = ranks.all_to_all(requested_u[owner_order_u].int(), recv_counts.tolist(), send_counts).long()
    owned_O, owned_index_S = torch.unique(sent_S // ranks.size, return_inverse=True)
    counts = recv_counts.tolist(), send_counts
    return RowPlan(ids_U, tensor_group, owner_order_u, *counts, owned_O, owned_index_S, num_passes)


def rows_from_owners(owned_OD: Tensor, plan: RowPlan, ranks: Group) -> Tensor:
    """[U, D]: the rows that this rank needs; `owned_OD`: its own rows that ranks request. Collective."""
    sent_SD = owned_OD.index_select(0, plan.owned_index_S)
    received_uD = ranks.all_to_all(sent_SD, plan.send_counts, plan.recv_counts)
    rows_uD = torch.empty_like(received_uD).index_copy_(0, plan.owner_order_u, received_uD)
    return _all_gather_rows(rows_uD, len(plan.ids_U), plan.tensor_group)


def gradients_to_owners(gradients_UD: Tensor, plan: RowPlan, ranks: Group) -> Tensor:
    """[O, D]: the sums of all ranks' gradients, added in the order of ranks, so deterministic. Collective."""
    sent_uD = _reduce_scatter_gradients(gradients_UD, plan.tensor_group).index_select(0, plan.owner_order_u)
    received_SD = ranks.all_to_all(sent_uD, plan.recv_counts, plan.send_counts)
    summed_OD = gradients_UD.new_zeros(len(plan.owned_O), gradients_UD.shape[1])
    by_rank = received_SD.split(plan.send_counts), plan.owned_index_S.split(plan.send_counts)
    for gradients, index in zip(*by_rank, strict=True):
        summed_OD.index_add_(0, index, gradients)  # a rank requests a row once
    return summed_OD


def _all_gather_rows(rows_uD: Tensor, count: int, group: Group) -> Tensor:
    """[U, D]: every T-th row from each of T ranks; `count`: U."""
    if group.size == 1:
        return rows_uD
    padded_uD = F.pad(rows_uD, (0, 0, 0, -(-count // group.size) - len(rows_uD)))  # some ranks have a row less
    return group.all_gather(padded_uD).transpose(0, 1).flatten(0, 1)[:count]


def _reduce_scatter_gradients(gradients_UD: Tensor, tensor_group: Group) -> Tensor:
    """[u, D]: the sums over these ranks of every T-th row's gradients: the backward pass of `_all_gather_rows`."""
    if tensor_group.size == 1:
        return gradients_UD
    count = len(range(tensor_group.rank, len(gradients_UD), tensor_group.size))
    padded_UD = F.pad(gradients_UD, (0, 0, 0, -len(gradients_UD) % tensor_group.size))
    return tensor_group.reduce_scatter(padded_UD.unflatten(0, (-1, tensor_group.size)), dim=1).squeeze(1)[:count]


# The rows that one rank owns, with their moments: stored as of each row's last update, read as of the current step.


class OwnedRows:
    """A rank's rows and moments in fp32 on the device; `last_step`, the steps of their last updates, on the CPU.

    Reading rows does not update them in place: the different rounding would prevent bitwise equal resumption.
    """

    def __init__(self, count: int, features: int, row_optimizer: RowOptimizer, device: torch.device) -> None:
        self.row_optimizer = row_optimizer
        widths = {WEIGHT: features} | {
            name: features if shape == "element" else 1 for name, shape in row_optimizer.moments.items()
        }
        self.rows = {name: torch.zeros(count, width, device=device) for name, width in widths.items()}
        self.last_step_n = torch.zeros(count, dtype=torch.int32)

    @property
    def steps(self) -> int:
        """Steps applied so far."""
        return self.row_optimizer.history.steps

    def count_stale(self, owned_O: Tensor) -> int:
        """The number of rows among `owned_O` (int64 on the CPU) that the last step did not update."""
        return int((self.last_step_n[owned_O] < self.steps).sum())

    def gather(self, owned_O: Tensor) -> dict[str, Tensor]:
        """Copies of these rows, updated to the current step."""
        index_O = owned_O.to(self.rows[WEIGHT].device)
        rows = {name: values.index_select(0, index_O) for name, values in self.rows.items()}
        self.row_optimizer.apply_pending_updates_(rows, self.last_step_n[owned_O])
        return rows

    def scatter(self, owned_O: Tensor, rows: Rows) -> None:
        """Stores these rows, which the last step updated."""
        index_O = owned_O.to(self.rows[WEIGHT].device)
        for name, values in self.rows.items():
            values.index_copy_(0, index_O, rows[name])
        self.last_step_n.index_fill_(0, owned_O, self.steps)

    def blocks(self) -> Iterator[Tensor]:
        """All weights as of the current step, in blocks [b, D]."""
        for index_b in torch.arange(len(self.last_step_n)).split(_BLOCK_ROWS):
            yield self.gather(index_b)[WEIGHT]

    def reset_steps(self) -> None:
        """Resets moments and steps to those before the first step; does not change weights."""
        for values in (*(values for name, values in self.rows.items() if name != WEIGHT), self.last_step_n):
            values.zero_()
        self.row_optimizer.resume(np.empty(0))


class FetchedRows:
    """The rows fetched for one step, and their gradients, which the step's last backward pass sends to the owners."""

    def __init__(self, plan: RowPlan, owned_rows: Rows, mesh: Mesh, dtype: torch.dtype) -> None:
        """`owned_rows`: this rank's O rows that ranks request, up to date; `dtype`: of looked-up rows. Collective."""
        self.owned_rows = owned_rows
        self.gradients_OD: Tensor | None = None
        """Gradients of `owned_rows`, summed over micro-batches and ranks, divided by the number of data ranks."""
        self._plan, self._mesh = plan.to(owned_rows[WEIGHT].device), mesh
        self.rows_UD = rows_from_owners(owned_rows[WEIGHT], self._plan, mesh.world_group).to(dtype)
        self._gradients_UD: Tensor | None = None
        self._passes_left, self._pending_lookups = plan.num_passes, 0

    def look_up(self, ids: Tensor, grad_norm_proxy: Tensor, num_duplicates: int = 0) -> Tensor:
        """[..., D]: the fetched rows of `ids`. Ignores the gradients of the first `num_duplicates` ids, which the first
        tensor rank looks up too, and counts. A forward pass may look up several times if each result gets a
        gradient."""
        if torch.is_grad_enabled():
            if not self._pending_lookups:
                self._passes_left -= 1
            self._pending_lookups += 1
        index = torch.searchsorted(self._plan.ids_U, ids)
        rows: Tensor = _LookUp.apply(grad_norm_proxy, self, index, num_duplicates)
        return rows

    def add_gradients(self, index: Tensor, gradients: Tensor) -> Tensor | None:
        """Adds the gradients of one lookup. The step's last call is collective, and returns the norm of the gradients
        of all ranks' rows."""
        added_UD = torch.ops.aten.embedding_dense_backward(
            gradients.float(), index, len(self.rows_UD), padding_idx=-1, scale_grad_by_freq=False
        )
        self._gradients_UD = added_UD if self._gradients_UD is None else self._gradients_UD.add_(added_UD)
        self._pending_lookups -= 1
        return None if self._pending_lookups or self._passes_left else self._complete(self._gradients_UD)

    def _complete(self, gradients_UD: Tensor) -> Tensor:
        world = self._mesh.world_group
        self.gradients_OD = gradients_to_owners(gradients_UD, self._plan, world).div_(self._mesh.data_group.size)
        self._gradients_UD = None
        return world.all_gather(self.gradients_OD.norm(dtype=torch.float64).square()).sum().sqrt()


class _LookUp(torch.autograd.Function):
    """Adds gradients to `fetched`. The gradient of `grad_norm_proxy` is 0; in the step's last backward pass it is a
    vector with the norm of all rows' gradients."""

    @staticmethod
    def forward(ctx: Any, grad_norm_proxy: Tensor, fetched: FetchedRows, index: Tensor, num_duplicates: int) -> Tensor:
        ctx.save_for_backward(index)
        ctx.fetched, ctx.num_duplicates, ctx.zeros = fetched, num_duplicates, torch.zeros_like(grad_norm_proxy)
        return F.embedding(index, fetched.rows_UD)

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (index,) = ctx.saved_tensors
        gradients = gradients.reshape(-1, gradients.shape[-1])[ctx.num_duplicates :]
        norm = ctx.fetched.add_gradients(index.flatten()[ctx.num_duplicates :], gradients)
        return ctx.zeros if norm is None else vector_with_norm(norm, ctx.zeros), None, None, None


def vector_with_norm(norm: Tensor, like: Tensor) -> Tensor:
    """A tensor of positive numbers, of the shape and dtype of `like`, with the L2 norm `norm` to a relative 1e-5.

    In half precision some are rounded up and the others down, in proportions that preserve the sum.
    """
    limits, count = torch.finfo(like.dtype), like.numel()
    element = norm.double() / math.sqrt(count)
    exponent = torch.frexp(element).exponent - 1.0
    spacing = (limits.eps * torch.exp2(exponent)).clamp_min(limits.smallest_normal * limits.eps)
    offsets = (torch.arange(count, device=like.device, dtype=torch.float64) + 0.5) / count
    return (torch.floor(element / spacing + offsets) * spacing).to(like.dtype).view_as(like)


# The module that replaces the embedding: looks up the rows fetched for the step.
#
# Rows are not a parameter. They contribute to the global gradient norm, to clipping and to the check for non-finite
# gradients through `grad_norm_proxy`, a small parameter without other use: in the last backward pass of a step row
# gradients are sent to their owners, and the proxy's gradient is set to their global norm. So the code that reduces,
# measures and clips gradients, at any ZeRO stage and in any precision, does not depend on rows.


GRAD_NORM_PROXY_SIZE = 4096
"""Elements of `grad_norm_proxy`: the gradient of each is 1/64 of the norm, far below fp16's largest number."""
_BLOCK_ROWS = 1 << 14
"""Rows in a block: of one rank in `OwnedRows.blocks`, of all ranks together in `weight_blocks`."""


class ShardedEmbedding(nn.Module):
    """The embedding [rows, D], sharded round-robin over all ranks. One step: `fetch`, lookups, then `step` or
    `discard`.

    Stored in fp32 in any precision of the model; looked-up rows have the dtype of `grad_norm_proxy`. In evaluation mode
    lookups fetch their rows from an up-to-date copy of all rows, which is cached until the next `fetch`. All methods
    are collective.
    """

    def __init__(
        self,
        rows: int,
        features: int,
        row_optimizer: RowOptimizer,
        mesh: Mesh,
        device: torch.device,
        learning_rate_ratio: float = 1.0,
    ) -> None:
        """`learning_rate_ratio`: the learning rate of rows over that of a step."""
        super().__init__()
        self.num_rows, self._learning_rate_ratio = rows, learning_rate_ratio
        self.grad_norm_proxy = nn.Parameter(torch.zeros(GRAD_NORM_PROXY_SIZE, device=device))
        count = len(range(mesh.world_group.rank, rows, mesh.world_group.size))
        self.owned = OwnedRows(count, features, row_optimizer, device)
        self._mesh, self._planning_group = mesh, mesh.world_group.new_gloo_group()
        self._fetched: FetchedRows | None = None
        self._current_nD: Tensor | None = None

    def forward(self, ids: Tensor, scattered_ids_U: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """[..., D]: rows of `ids`, which are the same on every tensor rank, as is their gradient: it counts once.

        With `scattered_ids_U` also [u, D]: the rows of this tensor rank's slice of these ids.
        U must be a multiple of the tensor ranks; the row of id -1 is zero.
        """
        tensor_group = self._mesh.tensor_group
        num_duplicates = ids.numel() if tensor_group.rank else 0
        if scattered_ids_U is None:
            return self._look_up(ids, num_duplicates)
        share_u = tensor_group.shard(scattered_ids_U, 0)
        rows = self._look_up(torch.cat([ids.flatten(), share_u.clamp_min(0)]), num_duplicates)
        inputs, rows_uD = rows.split([ids.numel(), len(share_u)])
        return inputs.view(*ids.shape, -1), rows_uD.masked_fill((share_u < 0)[:, None], 0.0)

    def load_rows_(self, blocks: Iterable[Tensor]) -> None:
        """Sets the initial rows, from consecutive blocks [b, D] of all rows, and resets moments and steps."""
        fill_shard_(self.owned.rows[WEIGHT], blocks, self._mesh.world_group)
        self.owned.reset_steps()
        self._current_nD = None

    def state(self) -> dict[str, Tensor | RoundRobinShard]:
        """The state for bitwise equal resumption on any number of ranks: rows and moments as of each row's last update,
        LAST_STEP, the step of each row's last update, and LEARNING_RATES of all steps (on every rank)."""
        shards = {name: RoundRobinShard(shard, self.num_rows) for name, shard in self._shards().items()}
        return {**shards, LEARNING_RATES: torch.from_numpy(self.owned.row_optimizer.history.rates)}

    def restore(self, state: TensorSource) -> None:
        """Restores the tensors of `state`, block by block."""
        for name, shard in self._shards().items():
            blocks = (_validate_row_shape(block, shard.shape[1:], name) for block in state.blocks(name))
            fill_shard_(shard, blocks, self._mesh.world_group)
        self.owned.row_optimizer.resume(state.read(LEARNING_RATES).numpy())
        self._current_nD = None

    def _shards(self) -> dict[str, Tensor]:
        return {**self.owned.rows, LAST_STEP: self.owned.last_step_n}

    def fetch(self, plan: RowPlan) -> None:
        """Fetches the rows of a step, up to date."""
        self._plan, self._current_nD = plan, None
        self._fetched = FetchedRows(plan, self.owned.gather(plan.owned_O), self._mesh, self.grad_norm_proxy.dtype)

    def step(self, learning_rate: float, scale: float) -> None:
        """Updates the fetched rows, with their gradients times `scale`."""
        fetched = self._fetched
        if fetched is None or fetched.gradients_OD is None:
            raise RuntimeError("rows are updated once, after the last backward pass since they were fetched")
        rows, rate = fetched.owned_rows, learning_rate * self._learning_rate_ratio
        self.owned.row_optimizer.step_(rows, fetched.gradients_OD.mul_(scale), rate)
        self.owned.scatter(self._plan.owned_O, rows)
        self.discard()

    def discard(self) -> None:
        """Discards the fetched rows."""
        self._fetched = None

    def weight_blocks(self, num_rows: int) -> Iterator[Tensor]:
        """The first `num_rows` rows in consecutive blocks [b, D], on every rank, in the model's dtype; for
        evaluation."""
        local_nD, ranks = self._current_rows(), self._mesh.world_group
        block_size = max(1, _BLOCK_ROWS // ranks.size)
        for start in range(0, -(-num_rows // ranks.size), block_size):
            first, block_bD = start * ranks.size, local_nD[start : start + block_size]
            count = min(block_size * ranks.size, self.num_rows - first)
            yield _all_gather_rows(block_bD, count, ranks)[: num_rows - first]

    def _look_up(self, ids: Tensor, num_duplicates: int) -> Tensor:
        """Rows of `ids`, without the gradients of the first `num_duplicates`, which another rank has, too."""
        if not self.training:
            plan = plan_rows(ids.flatten().cpu(), self._planning_group).to(ids.device)
            rows_UD = rows_from_owners(self._current_rows().index_select(0, plan.owned_O), plan, self._mesh.world_group)
            return F.embedding(torch.searchsorted(plan.ids_U, ids), rows_UD)
        if self._fetched is None:
            raise RuntimeError("rows are fetched before they are looked up")
        return self._fetched.look_up(ids, self.grad_norm_proxy, num_duplicates)

    def _current_rows(self) -> Tensor:
        """[n, D]: this rank's rows as of the current step."""
        if self._current_nD is None:
            blocks, shape = self.owned.blocks(), self.owned.rows[WEIGHT].shape
            self._current_nD = join_blocks((block.to(self.grad_norm_proxy.dtype) for block in blocks), shape)
        return self._current_nD


def _validate_row_shape(block: Tensor, shape: torch.Size, name: str) -> Tensor:
    """The block; CheckpointError if its rows have another shape, saved by another optimizer rule."""
    if block.shape[1:] != shape:
        fix = "resume with the optimizer.table.rule that the checkpoint was saved with"
        raise CheckpointError(f"`{name}` must be {[*shape]} for each row, but is {[*block.shape[1:]]}; {fix}.")
    return block


def shard_embedding_(backbone: nn.Module, config: RunConfig, mesh: Mesh, device: torch.device) -> None:
    """Replaces `backbone.embedding`, which is not allocated, by a `ShardedEmbedding` of zeros if `config` shards it.
    Collective over `mesh`."""
    if shards_embedding(config):
        rows, features, settings = config.model.padded_vocab_size(), config.model.hidden_size, config.optimizer.table
        row_optimizer = ROW_OPTIMIZERS[settings.rule](config.optimizer)
        embedding = ShardedEmbedding(rows, features, row_optimizer, mesh, device, settings.learning_rate_ratio)
        backbone.register_module("embedding", embedding)


def new_planning_group(config: RunConfig, mesh: Mesh) -> Group | None:
    """A new group of all ranks for `plan_rows`; None if the embedding is not sharded. Collective."""
    return mesh.world_group.new_gloo_group() if shards_embedding(config) else None
