"""A group of ranks, its collectives and autograd collectives, the mesh, random numbers per rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import zip_longest
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megahead.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Group:
    """Ranks that communicate; every method but `shard` is a collective, which all of them must call.

    Tensors travel through `handle` (gloo for CPU tensors, nccl for CUDA tensors).
    """

    rank: int = 0
    size: int = 1
    handle: dist.ProcessGroup | None = None
    timeout_seconds: float = 600
    """How long a rank waits for the others before it raises, in connections made from this one."""

    @staticmethod
    def world(timeout_seconds: float = 600) -> Group:
        """All connected ranks; one rank if torch.distributed is not initialized."""
        if not dist.is_initialized():
            return Group()
        return Group(dist.get_rank(), dist.get_world_size(), dist.group.WORLD, timeout_seconds)

    def new_gloo_group(self) -> Group:
        """The same ranks over a separate gloo connection, for CPU tensors; usable from another thread. Collective."""
        if self.size == 1:
            return self
        ranks = dist.get_process_group_ranks(self.handle)
        timeout = timedelta(seconds=self.timeout_seconds)
        handle = dist.new_group(ranks, timeout, backend="gloo", use_local_synchronization=True)
        return Group(self.rank, self.size, handle, self.timeout_seconds)

    def shard(self, full: Tensor, dim: int) -> Tensor:
        """A copy of this rank's equal slice of `full` along `dim`. Sends nothing, and is no collective."""
        size = full.shape[dim]
        if size % self.size:
            raise ValueError(f"dim {dim} of size {size} cannot be split evenly over {self.size} ranks")
        return full.chunk(self.size, dim)[self.rank].clone(memory_format=torch.contiguous_format)

    def unshard(self, part: Tensor, dim: int) -> Tensor:
        """All ranks' parts (of one shape) in rank order along `dim` (from 0 on): the inverse of `shard`.

        They are received where they belong if `dim` is 0, else copied once.
        """
        return part if self.size == 1 else self.all_gather(part).movedim(0, dim).flatten(dim, dim + 1)

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Sums `tensor` over the group in place; every rank gets the sum. Moves ~2x its bytes."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.handle)
        return tensor

    def all_reduce_max_(self, tensor: Tensor) -> Tensor:
        """Largest value over the group, elementwise and in place."""
        if self.size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.handle)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[size, *shape]: every rank's tensor (all of one shape) in rank order."""
        if self.size == 1:
            return tensor.unsqueeze(0)
        gathered = tensor.new_empty(self.size, *tensor.shape)
        dist.all_gather_into_tensor(gathered.flatten(), tensor.flatten(), group=self.handle)
        return gathered

    def reduce_scatter(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """This rank's slice along `dim`, as `shard` cuts it, of the sum of all ranks' tensors."""
        if self.size == 1:
            return tensor
        parts = tensor.unflatten(dim, (self.size, -1)).movedim(dim, 0).contiguous()
        share = torch.empty_like(parts[0])
        dist.reduce_scatter_tensor(share.flatten(), parts.flatten(), group=self.handle)
        return share

    def all_to_all(self, tensor: Tensor, sent: list[int] | None = None, received: list[int] | None = None) -> Tensor:
        """Parts along dim 0 in rank order, one from each rank: of `tensor` each rank gets the next `sent[its rank]`.

        `received`: how much each rank sends here, which all must know beforehand. Without both all parts are equal.
        """
        if self.size == 1:
            return tensor
        count = len(tensor) if received is None else sum(received)
        parts = tensor.new_empty(count, *tensor.shape[1:])
        dist.all_to_all_single(parts, tensor.contiguous(), received, sent, group=self.handle)
        return parts

    def all_gather_objects(self, value: T) -> list[T]:
        """Every rank's (small, picklable) value in rank order; for settings and messages, not for tensors."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.handle)
        return values

    def broadcast_object(self, value: T) -> T:
        """Rank 0's (small, picklable) value on every rank."""
        if self.size == 1:
            return value
        box = [value]
        first = dist.get_process_group_ranks(self.handle)[0]
        dist.broadcast_object_list(box, src=first, group=self.handle)
        return box[0]


# Collectives with gradients, named after what the forward pass does.
#
# Two conventions make them short: a value that is equal on every rank of a group has a gradient that is equal on every
# rank, and the scalar on which backward is called is equal on all. With one rank each of them is the identity.


def reduce_from_group(part: Tensor, group: Group) -> Tensor:
    """The sum of all ranks' parts, on every rank; backward sends nothing. Ends a tensor-parallel region."""
    return _collective(part, group, "sum", "same")


def copy_to_group(same: Tensor, group: Group) -> Tensor:
    """`same`, unchanged; backward sums its gradient over the ranks. Begins a tensor-parallel region."""
    return _collective(same, group, "same", "sum")


def reduce_scatter_to_group(parts: Tensor, group: Group, dim: int = 0) -> Tensor:
    """This rank's slice along `dim` of the sum of all ranks' parts; backward gathers."""
    return _collective(parts, group, "reduce_scatter", "unshard", dim)


def scatter_to_group(same: Tensor, group: Group, dim: int) -> Tensor:
    """This rank's slice along `dim` of what all ranks have; backward gathers. Begins a sequence-parallel region."""
    return _collective(same, group, "shard", "unshard", dim)


def gather_from_group(share: Tensor, group: Group, dim: int) -> Tensor:
    """The whole tensor of which every rank has a slice along `dim`; all ranks must use it alike, since backward sends
    nothing. The inverse of `scatter_to_group`.
    """
    return _collective(share, group, "unshard", "shard", dim)


_OPERATIONS: Mapping[str, Callable[[Group, Tensor, int], Tensor]] = {
    "same": lambda group, tensor, dim: tensor.view_as(tensor),
    "sum": lambda group, tensor, dim: group.all_reduce_(tensor.clone(memory_format=torch.contiguous_format)),
    "shard": Group.shard,
    "unshard": Group.unshard,
    "reduce_scatter": Group.reduce_scatter,
}


def _collective(tensor: Tensor, group: Group, forward: str, backward: str, dim: int = 0) -> Tensor:
    if group.size == 1:
        return tensor
    output: Tensor = _Collective.apply(tensor, group, forward, backward, dim)
    return output


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, forward: str, backward: str, dim: int) -> Tensor:
        ctx.group, ctx.dim, ctx.operation = group, dim, backward
        return _OPERATIONS[forward](group, tensor, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return _OPERATIONS[ctx.operation](ctx.group, grad, ctx.dim), None, None, None, None


@dataclass(frozen=True)
class Mesh:
    """This rank's groups: the ranks of `tensor_group` split each layer, those of `data_group` each batch.

    World rank = data rank * tensor size + tensor rank: a tensor group is consecutive ranks, with the fastest links.
    """

    world_group: Group = field(default_factory=Group)
    tensor_group: Group = field(default_factory=Group)
    data_group: Group = field(default_factory=Group)

    @staticmethod
    def build(world_group: Group, tensor_size: int = 1) -> Mesh:
        """Divides `world_group` into tensor groups of `tensor_size` consecutive ranks. Collective over all of it."""
        if world_group.size % tensor_size:
            raise ConfigError("parallel.tensor", f"divide the number of ranks ({world_group.size})", got=tensor_size)
        if tensor_size == 1:
            return Mesh(world_group, Group(), world_group)
        data_size = world_group.size // tensor_size
        grid = [[d * tensor_size + t for t in range(tensor_size)] for d in range(data_size)]
        seconds = world_group.timeout_seconds
        timeout = timedelta(seconds=seconds)
        tensor, _ = dist.new_subgroups_by_enumeration(grid, timeout)
        data, _ = dist.new_subgroups_by_enumeration([list(column) for column in zip(*grid, strict=True)], timeout)
        data_rank, tensor_rank = divmod(world_group.rank, tensor_size)
        return Mesh(
            world_group, Group(tensor_rank, tensor_size, tensor, seconds), Group(data_rank, data_size, data, seconds)
        )


# Bytes that each rank passes to one other, in the background and in pieces, so that it can be ended between two.


PIECE = 16 << 20
"""Bytes that are sent at a time: an eighth of a second at 1 Gb/s."""


def exchange_bytes(group: Group, mine: Tensor, to: int, theirs: Mapping[int, Tensor], ends: Callable[[], bool]) -> bool:
    """Sends `mine` (uint8 [n]) to rank `to`, while the bytes that other ranks send here are received into `theirs`, by
    rank. Returns whether all came. Collective: `to` and `theirs` must agree over the ranks of `group` (gloo).

    Once `ends` is true a rank sends no further piece, and says so to those that wait for it. It waits for each piece
    `group.timeout_seconds` at most.
    """
    outgoing, incoming = mine.split(PIECE), {rank: part.split(PIECE) for rank, part in theirs.items()}
    stopped, cut_short = False, set[int]()
    for number, piece in zip_longest(range(max(map(len, (outgoing, *incoming.values())))), outgoing):
        sending = []
        if piece is not None and not stopped:
            stopped = ends()
            sending = _send(group, torch.tensor([not stopped]), to) + ([] if stopped else _send(group, piece, to))
        for rank, places in incoming.items():
            if number < len(places) and rank not in cut_short and not _receive(group, places[number], rank):
                cut_short.add(rank)
        for work in sending:
            work.wait()
    return not stopped and not cut_short


def _send(group: Group, tensor: Tensor, to: int) -> list[dist.Work]:
    work = dist.isend(tensor, group=group.handle, group_dst=to)
    return [] if work is None else [work]


def _receive(group: Group, place: Tensor, rank: int) -> bool:
    """Whether a piece came, and not word that none will."""
    comes = torch.empty(1, dtype=torch.bool)
    dist.recv(comes, group=group.handle, group_src=rank)
    if comes:
        dist.recv(place, group=group.handle, group_src=rank)
    return bool(comes)


@contextmanager
def per_rank_rng(group: Group, device: torch.device) -> Iterator[None]:
    """Inside, every rank of `group` draws different numbers; afterwards all draw the same again. Sends nothing.

    Torch's CPU generator must be in the same state on all ranks on entry. Draws depend on that state alone, so that a
    forward pass that is repeated from it (activation checkpointing, a resumed run) draws the same again.
    """
    if group.size == 1:
        yield
        return
    seed = int(torch.randint(2**48, ()))
    with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type="cuda"):
        torch.manual_seed(seed * group.size + group.rank)
        yield


def has_fast_bf16(device: torch.device) -> bool:
    """Whether training in bf16 is faster than in fp32: on GPUs since Ampere, and on CPUs that multiply bf16, by AMX or
    by AVX-512 (measured: products 7 and 2.4 times as fast, the demo's whole headless step 1.6 and 1.5 times). A CPU
    whose capabilities torch does not know counts as slow."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return device.type == "cpu" and any(map(capabilities.get, ("amx_bf16", "avx512_bf16")))
