"""The sharded embedding: who owns which rows, their exchange, and the module that stands in the embedding's place.

Rows are sharded round-robin: rank i mod R owns id i, at place i // R, so that frequent ids, which are neighbours in
most vocabularies, are spread evenly. R ranks; n rows of this rank; U: ids that this rank needs; u: those that it
requests; S: rows that others request of it (repeats counted); O: how many of these are distinct; D features. *Places*
are indices into the U rows.
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
from megahead.sharded_embedding.optimizer import WEIGHT, RowOptimizer, Rows, build_row_optimizer
from megahead.sharded_embedding.saved import LAST_STEP, RATES

# The exchange of a step's rows, planned ahead of it.
#
# Ranks that need the same ids, a tensor group, request every T-th each, and share what comes: u = U / T.


@dataclass(frozen=True)
class RowPlan:
    """One rank's part in the exchange of rows of one step."""

    ids_U: Tensor
    """int64: the ids that it needs, increasing, each once."""

    sharing: Group
    """T ranks that need the same ids. Its rank t requests `ids_U[t::T]`."""

    by_owner_u: Tensor
    """int64: the permutation that sorts the ids it requests by owning rank."""

    requested: list[int]
    """How many rows it requests of each rank."""

    served: list[int]
    """How many rows each rank requests of it."""

    owned_O: Tensor
    """int64: indices, among this rank's own rows, of those that any rank requests; increasing, without repeats."""

    place_S: Tensor
    """int64: for each row that it serves, ordered by requesting rank: its index in `owned_O`."""

    num_passes: int
    """How many forward passes the step has; the last backward pass completes the row gradients."""

    def to(self, device: torch.device) -> RowPlan:
        """The same on `device`."""
        names = ("ids_U", "by_owner_u", "owned_O", "place_S")
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in names})


def plan_rows(ids: Tensor, ranks: Group, num_passes: int = 1, sharing: Group | None = None) -> RowPlan:
    """The plan of a step that needs `ids` (int64 on the CPU, repeats allowed), the same ones on all ranks of `sharing`.

    Collective over `ranks`, which must be a group for CPU tensors (gloo): sends one count to each rank, then 4 bytes
    per id. Nothing is sent over `sharing` yet.
    """
    ids_U, sharing = torch.unique(ids), sharing or Group()
    requested_u = ids_U[sharing.rank :: sharing.size]
    owners_u = requested_u % ranks.size
    by_owner_u = torch.argsort(owners_u, stable=True)
    requested = torch.bincount(owners_u, minlength=ranks.size)
    served = ranks.all_to_all(requested).tolist()
    wanted_S = ranks.all_to_all(requested_u[by_owner_u].int(), requested.tolist(), served).long()
    owned_O, place_S = torch.unique(wanted_S // ranks.size, return_inverse=True)
    return RowPlan(ids_U, sharing, by_owner_u, requested.tolist(), served, owned_O, place_S, num_passes)


def rows_from_owners(owned_OD: Tensor, plan: RowPlan, ranks: Group) -> Tensor:
    """[U, D]: the rows that this rank needs; `owned_OD`: those that others request of it. Collective."""
    sent_SD = owned_OD.index_select(0, plan.place_S)
    got_uD = ranks.all_to_all(sent_SD, plan.served, plan.requested)
    share_uD = torch.empty_like(got_uD).index_copy_(0, plan.by_owner_u, got_uD)
    return _joined(share_uD, len(plan.ids_U), plan.sharing)


def gradients_to_owners(gradients_UD: Tensor, plan: RowPlan, ranks: Group) -> Tensor:
    """[O, D]: the sums of all ranks' gradients, added in the order of ranks: the same bits each time. Collective."""
    sent_uD = _summed_share(gradients_UD, plan.sharing).index_select(0, plan.by_owner_u)
    got_SD = ranks.all_to_all(sent_uD, plan.requested, plan.served)
    summed_OD = gradients_UD.new_zeros(len(plan.owned_O), gradients_UD.shape[1])
    for part, place in zip(got_SD.split(plan.served), plan.place_S.split(plan.served), strict=True):
        summed_OD.index_add_(0, place, part)  # a rank requests a row once
    return summed_OD


def _joined(share_uD: Tensor, count: int, sharing: Group) -> Tensor:
    """[U, D]: every T-th row from each rank; `count`: U."""
    if sharing.size == 1:
        return share_uD
    even_uD = F.pad(share_uD, (0, 0, 0, -(-count // sharing.size) - len(share_uD)))  # some ranks have a row less
    return sharing.all_gather(even_uD).transpose(0, 1).flatten(0, 1)[:count]


def _summed_share(gradients_UD: Tensor, sharing: Group) -> Tensor:
    """[u, D]: the sums of every T-th row's gradients over these ranks: the inverse way of `_joined`."""
    if sharing.size == 1:
        return gradients_UD
    count = len(range(sharing.rank, len(gradients_UD), sharing.size))
    even_UD = F.pad(gradients_UD, (0, 0, 0, -len(gradients_UD) % sharing.size))
    return sharing.reduce_scatter(even_UD.unflatten(0, (-1, sharing.size)), dim=1).squeeze(1)[:count]


# The rows that one rank owns, with their moments: kept as they were when last updated, read as they would be now.


class OwnedRows:
    """fp32 on the device; `last_step`, the steps at which rows were last updated, on the CPU.

    Rows are never brought up to date in place only to look at them: roundings would move, and a run that was saved
    would not go on bitwise.
    """

    def __init__(self, count: int, features: int, row_optimizer: RowOptimizer, device: torch.device) -> None:
        self.row_optimizer = row_optimizer
        widths = {WEIGHT: features} | {
            n: features if kind == "each" else 1 for n, kind in row_optimizer.moments.items()
        }
        self.rows = {name: torch.zeros(count, width, device=device) for name, width in widths.items()}
        self.last_step_n = torch.zeros(count, dtype=torch.int32)

    @property
    def steps(self) -> int:
        """Steps applied so far."""
        return self.row_optimizer.history.steps

    def count_stale(self, owned_O: Tensor) -> int:
        """How many of these have not been updated by the last step (int64 on the CPU)."""
        return int((self.last_step_n[owned_O] < self.steps).sum())

    def take(self, owned_O: Tensor) -> dict[str, Tensor]:
        """Copies of these rows, brought up to date."""
        there_O = owned_O.to(self.rows[WEIGHT].device)
        taken = {name: values.index_select(0, there_O) for name, values in self.rows.items()}
        self.row_optimizer.catch_up_(taken, self.last_step_n[owned_O])
        return taken

    def put(self, owned_O: Tensor, rows: Rows) -> None:
        """These rows were updated by the last step."""
        there_O = owned_O.to(self.rows[WEIGHT].device)
        for name, values in self.rows.items():
            values.index_copy_(0, there_O, rows[name])
        self.last_step_n.index_fill_(0, owned_O, self.steps)

    def blocks(self) -> Iterator[Tensor]:
        """All weights as they would be now, some [b, D] at a time."""
        for places in torch.arange(len(self.last_step_n)).split(_BLOCK):
            yield self.take(places)[WEIGHT]

    def reset_steps(self) -> None:
        """Weights are as new: everything else is as before the first step."""
        for values in (*(values for name, values in self.rows.items() if name != WEIGHT), self.last_step_n):
            values.zero_()
        self.row_optimizer.resume(np.empty(0))


class FetchedRows:
    """What came from the owners, and what will go back to them once the step's last backward pass is done."""

    def __init__(self, plan: RowPlan, served: Rows, mesh: Mesh, dtype: torch.dtype) -> None:
        """`plan`: which rows this rank requests of others and they of it, and how many forward passes the step has;
        `served`: the O rows, up to date; `dtype`: of looked-up rows. Collective."""
        self.served = served
        self.sums_OD: Tensor | None = None
        """Gradients of `served`, over all micro-batches and ranks, on average over data ranks."""
        self._plan, self._mesh = plan.to(served[WEIGHT].device), mesh
        self._rows_UD = rows_from_owners(served[WEIGHT], self._plan, mesh.world_group).to(dtype)
        self._gradients_UD: Tensor | None = None
        self._passes_left, self._open_lookups = plan.num_passes, 0

    def look_up(self, ids: Tensor, norm_proxy: Tensor, num_duplicates: int = 0) -> Tensor:
        """[..., D]: the rows of `ids`, among those fetched. Gradients of the first `num_duplicates` ids are not counted
        here, since another rank has the same ones and counts them. A forward pass may look up several times, if all
        that it looks up has a gradient."""
        if torch.is_grad_enabled():
            self._passes_left -= self._open_lookups == 0
            self._open_lookups += 1
        places = torch.searchsorted(self._plan.ids_U, ids)
        looked_up: Tensor = _LookUp.apply(norm_proxy, self, places, num_duplicates)
        return looked_up

    def rows_at(self, places: Tensor) -> Tensor:
        return F.embedding(places, self._rows_UD)

    def add_gradients(self, places: Tensor, gradients: Tensor) -> Tensor | None:
        """Of one lookup; after the last one of all backward passes the norm of all rows' gradients together.
        Collective then."""
        added_UD = torch.ops.aten.embedding_dense_backward(
            gradients.float(), places, len(self._rows_UD), padding_idx=-1, scale_grad_by_freq=False
        )
        self._gradients_UD = added_UD if self._gradients_UD is None else self._gradients_UD.add_(added_UD)
        self._open_lookups -= 1
        return None if self._open_lookups or self._passes_left else self._complete(self._gradients_UD)

    def _complete(self, gradients_UD: Tensor) -> Tensor:
        world = self._mesh.world_group
        self.sums_OD = gradients_to_owners(gradients_UD, self._plan, world).div_(self._mesh.data_group.size)
        self._gradients_UD = None
        return world.all_gather(self.sums_OD.norm(dtype=torch.float64).square()).sum().sqrt()


class _LookUp(torch.autograd.Function):
    """Hands gradients to `fetched`; the norm proxy's gradient is 0, but in the last backward pass has the norm of all
    rows' gradients together."""

    @staticmethod
    def forward(ctx: Any, norm_proxy: Tensor, fetched: FetchedRows, places: Tensor, num_duplicates: int) -> Tensor:
        ctx.save_for_backward(places)
        ctx.fetched, ctx.num_duplicates, ctx.zeros = fetched, num_duplicates, torch.zeros_like(norm_proxy)
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


# The module in the embedding's place: it looks rows up among those that were fetched for the step.
#
# Rows are no parameter. They count in the global gradient norm, in clipping and in the search for gradients that are
# not finite through the *norm proxy*, a parameter of a few numbers that does nothing else: in the last backward pass
# of a step row gradients go to their owners, and the proxy's gradient gets the norm of all of them together. Whoever
# reduces, measures and clips gradients, at any ZeRO stage and in any precision, then needs to know nothing of rows.


NORM_PROXY_SIZE = 4096
"""Numbers of the norm proxy: the gradient of each is 1/64 of the whole, far from fp16's largest number."""
_BLOCK = 1 << 14
"""Rows of all ranks that are scored against at once."""


class RowTable(nn.Module):
    """The embedding [rows, D], sharded round-robin over all ranks. One step: `fetch`, lookups, then `step` or
    `discard`.

    fp32, whatever the precision of the model around it: looked-up rows come in that of the norm proxy. In evaluation
    mode lookups fetch what they need, from a copy of all rows that is up to date and kept until the next `fetch`.
    Every method is to be called by all ranks.
    """

    def __init__(
        self,
        rows: int,
        features: int,
        row_optimizer: RowOptimizer,
        mesh: Mesh,
        device: torch.device,
        rate_ratio: float = 1.0,
    ) -> None:
        """`rate_ratio`: the learning rate of rows over that of a step."""
        super().__init__()
        self.num_rows, self._rate_ratio = rows, rate_ratio
        self.norm_proxy = nn.Parameter(torch.zeros(NORM_PROXY_SIZE, device=device))
        self.owned = OwnedRows(
            len(range(mesh.world_group.rank, rows, mesh.world_group.size)), features, row_optimizer, device
        )
        self._mesh, self._planning_group = mesh, mesh.world_group.new_gloo_group()
        self._fetched: FetchedRows | None = None
        self._now_nD: Tensor | None = None

    def forward(self, ids: Tensor, scattered_ids_U: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """[..., D]: rows of `ids` on every tensor rank, which all have the same gradient.

        With `scattered_ids_U` also [u, D]: this rank's even share of their rows, as of a `VocabularyParallelEmbedding`.
        U must be a multiple of the tensor ranks; an id of -1 has a row of zeros.
        """
        tensor = self._mesh.tensor_group
        num_duplicates = ids.numel() if tensor.rank else 0
        if scattered_ids_U is None:
            return self._look_up(ids, num_duplicates)
        share_u = tensor.shard(scattered_ids_U, 0)
        looked_up = self._look_up(torch.cat([ids.flatten(), share_u.clamp_min(0)]), num_duplicates)
        inputs, rows_uD = looked_up.split([ids.numel(), len(share_u)])
        return inputs.view(*ids.shape, -1), rows_uD.masked_fill((share_u < 0)[:, None], 0.0)

    def fill_(self, blocks: Iterable[Tensor]) -> None:
        """Rows that no step has updated yet, from consecutive blocks [b, D] of all of them."""
        fill_shard_(self.owned.rows[WEIGHT], blocks, self._mesh.world_group)
        self.owned.reset_steps()
        self._now_nD = None

    def state(self) -> dict[str, Tensor | RoundRobinShard]:
        """What goes on bitwise when it is restored, on any number of ranks: rows and moments as they were last updated,
        `touched`, the steps at which that was [V], and the `rates` of all steps (on every rank)."""
        shards = {kind: RoundRobinShard(part, self.num_rows) for kind, part in self._shards().items()}
        return {**shards, RATES: torch.from_numpy(self.owned.row_optimizer.history.rates)}

    def restore(self, state: TensorSource) -> None:
        """The inverse of `state`, whose names these tensors have; of each a block is held at a time."""
        for kind, part in self._shards().items():
            blocks = (_of_rows(block, part.shape[1:], kind) for block in state.blocks(kind))
            fill_shard_(part, blocks, self._mesh.world_group)
        self.owned.row_optimizer.resume(state.read(RATES).numpy())
        self._now_nD = None

    def _shards(self) -> dict[str, Tensor]:
        return {**self.owned.rows, LAST_STEP: self.owned.last_step_n}

    def fetch(self, plan: RowPlan) -> None:
        """Rows of a step come here, up to date."""
        self._plan, self._now_nD = plan, None
        self._fetched = FetchedRows(plan, self.owned.take(plan.owned_O), self._mesh, self.norm_proxy.dtype)

    def step(self, learning_rate: float, scale: float) -> None:
        """Updates the rows that were fetched, by their gradients times `scale`."""
        fetched = self._fetched
        if fetched is None or fetched.sums_OD is None:
            raise RuntimeError("rows are updated once, after the last backward pass since they were fetched")
        self.owned.row_optimizer.step_(fetched.served, fetched.sums_OD.mul_(scale), learning_rate * self._rate_ratio)
        self.owned.put(self._plan.owned_O, fetched.served)
        self.discard()

    def discard(self) -> None:
        """Forgets what was fetched."""
        self._fetched = None

    def weight_blocks(self, until: int) -> Iterator[Tensor]:
        """The first `until` rows, consecutive [b, D], on every rank in the model's precision, in evaluation mode."""
        own_nD, ranks = self._now(), self._mesh.world_group
        most, of_each = -(-self.num_rows // ranks.size), max(1, _BLOCK // ranks.size)  # some ranks have a row less
        for place in range(0, -(-until // ranks.size), of_each):
            part_bD = own_nD[place : place + of_each]
            even_bD = F.pad(part_bD, (0, 0, 0, min(of_each, most - place) - len(part_bD)))
            yield ranks.all_gather(even_bD).transpose(0, 1).flatten(0, 1)[: until - place * ranks.size]

    def _look_up(self, ids: Tensor, num_duplicates: int) -> Tensor:
        """Rows of `ids`; another rank counts the gradients of the first `num_duplicates` of them."""
        if not self.training:
            plan = plan_rows(ids.flatten().cpu(), self._planning_group).to(ids.device)
            rows_UD = rows_from_owners(self._now().index_select(0, plan.owned_O), plan, self._mesh.world_group)
            return F.embedding(torch.searchsorted(plan.ids_U, ids), rows_UD)
        if self._fetched is None:
            raise RuntimeError("rows are fetched before they are looked up")
        return self._fetched.look_up(ids, self.norm_proxy, num_duplicates)

    def _now(self) -> Tensor:
        """[n, D]: this rank's rows as they would be now."""
        if self._now_nD is None:
            blocks, kept_nD = self.owned.blocks(), self.owned.rows[WEIGHT]
            self._now_nD = join_blocks((block.to(self.norm_proxy.dtype) for block in blocks), kept_nD.shape)
        return self._now_nD


def _of_rows(block: Tensor, shape: torch.Size, kind: str) -> Tensor:
    """The block; CheckpointError where another rule has other numbers of a row under the same name."""
    if block.shape[1:] != shape:
        rule = "a checkpoint of rows goes on with the optimizer.table.rule that it was saved with"
        raise CheckpointError(f"`{kind}` must be {[*shape]} for each row, but is {[*block.shape[1:]]}; {rule}.")
    return block


def shard_embedding_(backbone: nn.Module, config: RunConfig, mesh: Mesh, device: torch.device) -> None:
    """Replaces `backbone.embedding`, which has no memory yet, by a `RowTable` of zeros, if `config` says so.
    Collective over `mesh`."""
    if shards_embedding(config):
        rows, features, settings = config.model.padded_vocab_size(), config.model.hidden_size, config.optimizer.table
        row_optimizer = build_row_optimizer(settings.rule, config.optimizer)
        table = RowTable(rows, features, row_optimizer, mesh, device, settings.learning_rate_ratio)
        backbone.register_module("embedding", table)


def owners_of(config: RunConfig, mesh: Mesh) -> Group | None:
    """A connection of its own between the ranks that own rows; None where the embedding is dense. Collective."""
    return mesh.world_group.new_gloo_group() if shards_embedding(config) else None
