"""Groups of ranks, the mesh; collectives with and without gradients; background exchange; per-rank random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import zip_longest
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megahead.errors import ConfigError

T = TypeVar("T")

# torch 2.13 renamed these, and warns about the old names
_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True)
class Group:
    """Ranks that communicate. All of them must call every method except `world` and `shard`, which send nothing."""

    rank: int = 0
    size: int = 1
    handle: dist.ProcessGroup | None = None
    """torch's group (gloo for CPU tensors, nccl for CUDA tensors)."""

    timeout_seconds: float = 600
    """The timeout of process groups that are created from this one."""

    @staticmethod
    def world(timeout_seconds: float = 600) -> Group:
        """All connected ranks; one rank if torch.distributed is not initialized."""
        if not dist.is_initialized():
            return Group()
        return Group(dist.get_rank(), dist.get_world_size(), dist.group.WORLD, timeout_seconds)

    def new_gloo_group(self) -> Group:
        """A separate gloo group of the same ranks, for CPU tensors or another thread. Collective."""
        if self.size == 1:
            return self
        ranks = dist.get_process_group_ranks(self.handle)
        timeout = timedelta(seconds=self.timeout_seconds)
        handle = dist.new_group(ranks, timeout, backend="gloo", use_local_synchronization=True)
        return Group(self.rank, self.size, handle, self.timeout_seconds)

    def shard(self, full: Tensor, dim: int) -> Tensor:
        """A copy of this rank's equal slice of `full` along `dim`. Sends nothing."""
        size = full.shape[dim]
        if size % self.size:
            raise ValueError(f"dim {dim} of size {size} cannot be split evenly over {self.size} ranks")
        return full.chunk(self.size, dim)[self.rank].clone(memory_format=torch.contiguous_format)

    def unshard(self, shard: Tensor, dim: int) -> Tensor:
        """All ranks' shards (of one shape) concatenated in rank order along `dim` (not negative); inverse of `shard`.
        They are received in their final position if `dim` is 0, otherwise copied once."""
        return shard if self.size == 1 else self.all_gather(shard).movedim(0, dim).flatten(dim, dim + 1)

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Sums `tensor` over the group in place; every rank gets the sum. Moves ~2x its bytes."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.handle)
        return tensor

    def all_reduce_max_(self, tensor: Tensor) -> Tensor:
        """Takes the elementwise maximum over the group, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.handle)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[size, *shape]: every rank's tensor (all of one shape) in rank order."""
        if self.size == 1:
            return tensor.unsqueeze(0)
        gathered = tensor.new_empty(self.size, *tensor.shape)
        _all_gather(gathered.flatten(), tensor.flatten(), group=self.handle)
        return gathered

    def reduce_scatter(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """This rank's slice along `dim` (as in `shard`) of the sum of all ranks' tensors."""
        if self.size == 1:
            return tensor
        parts = tensor.unflatten(dim, (self.size, -1)).movedim(dim, 0).contiguous()
        shard = torch.empty_like(parts[0])
        _reduce_scatter(shard.flatten(), parts.flatten(), group=self.handle)
        return shard

    def all_to_all(
        self, tensor: Tensor, input_splits: list[int] | None = None, output_splits: list[int] | None = None
    ) -> Tensor:
        """The parts that the ranks send to this one, concatenated along dim 0 in rank order. `input_splits`: rows of
        `tensor` for each rank; `output_splits`: rows from each rank. None: all parts are equal."""
        if self.size == 1:
            return tensor
        count = len(tensor) if output_splits is None else sum(output_splits)
        output = tensor.new_empty(count, *tensor.shape[1:])
        dist.all_to_all_single(output, tensor.contiguous(), output_splits, input_splits, group=self.handle)
        return output

    def all_gather_objects(self, value: T) -> list[T]:
        """Every rank's value (small and picklable, no tensor) in rank order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.handle)
        return values

    def broadcast_object(self, value: T) -> T:
        """Rank 0's (small, picklable) value on every rank."""
        if self.size == 1:
            return value
        objects = [value]
        source = dist.get_process_group_ranks(self.handle)[0]
        dist.broadcast_object_list(objects, src=source, group=self.handle)
        return objects[0]


# Collectives with gradients, named after their forward pass.
#
# They rely on two conventions: a tensor that is replicated over a group has a replicated gradient, and backward is
# called on a replicated scalar. With one rank each of them is the identity.


def reduce_from_group(part: Tensor, group: Group) -> Tensor:
    """The sum of all ranks' parts, on every rank; backward sends nothing. Ends a tensor-parallel region."""
    return _collective(part, group, "sum", "identity")


def copy_to_group(replicated: Tensor, group: Group) -> Tensor:
    """`replicated`, unchanged; backward sums its gradient over the ranks. Starts a tensor-parallel region."""
    return _collective(replicated, group, "identity", "sum")


def reduce_scatter_to_group(parts: Tensor, group: Group, dim: int = 0) -> Tensor:
    """This rank's slice along `dim` of the sum of all ranks' parts; backward gathers."""
    return _collective(parts, group, "reduce_scatter", "unshard", dim)


def scatter_to_group(replicated: Tensor, group: Group, dim: int) -> Tensor:
    """This rank's slice along `dim` of a replicated tensor; backward gathers. Starts a sequence-parallel region."""
    return _collective(replicated, group, "shard", "unshard", dim)


def gather_from_group(shard: Tensor, group: Group, dim: int) -> Tensor:
    """The full tensor from every rank's slice along `dim`; the inverse of `scatter_to_group`. All ranks must use it in
    the same way, since backward sends nothing."""
    return _collective(shard, group, "unshard", "shard", dim)


_OPERATIONS: Mapping[str, Callable[[Group, Tensor, int], Tensor]] = {
    "identity": lambda group, tensor, dim: tensor.view_as(tensor),
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
        ctx.group, ctx.dim, ctx.backward_operation = group, dim, backward
        return _OPERATIONS[forward](group, tensor, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return _OPERATIONS[ctx.backward_operation](ctx.group, grad, ctx.dim), None, None, None, None


@dataclass(frozen=True)
class Mesh:
    """This rank's groups: `tensor_group` splits each layer, `data_group` each batch. World rank = data rank * tensor
    size + tensor rank, so that a tensor group has consecutive ranks, which have the fastest links."""

    world_group: Group = field(default_factory=Group)
    tensor_group: Group = field(default_factory=Group)
    data_group: Group = field(default_factory=Group)

    @staticmethod
    def build(world_group: Group, tensor_size: int = 1) -> Mesh:
        """Divides `world_group` into tensor groups of `tensor_size` consecutive ranks. Collective."""
        if world_group.size % tensor_size:
            raise ConfigError("parallel.tensor", f"divide the number of ranks ({world_group.size})", got=tensor_size)
        if tensor_size == 1:
            return Mesh(world_group, Group(), world_group)
        data_size = world_group.size // tensor_size
        grid = [[d * tensor_size + t for t in range(tensor_size)] for d in range(data_size)]
        timeout_seconds = world_group.timeout_seconds
        timeout = timedelta(seconds=timeout_seconds)
        tensor, _ = dist.new_subgroups_by_enumeration(grid, timeout)
        data, _ = dist.new_subgroups_by_enumeration([list(column) for column in zip(*grid, strict=True)], timeout)
        data_rank, tensor_rank = divmod(world_group.rank, tensor_size)
        return Mesh(
            world_group,
            Group(tensor_rank, tensor_size, tensor, timeout_seconds),
            Group(data_rank, data_size, data, timeout_seconds),
        )


# Point-to-point exchange of bytes in the background, in chunks, so that it can be cancelled between two.


CHUNK_BYTES = 16 << 20
"""An eighth of a second at 1 Gb/s."""


def exchange_bytes(
    group: Group, outgoing: Tensor, destination: int, incoming: Mapping[int, Tensor], is_cancelled: Callable[[], bool]
) -> bool:
    """Sends `outgoing` (uint8 [n]) to rank `destination`, and receives from each source rank into `incoming[rank]`.

    Returns whether this rank sent and received everything. Once `is_cancelled()` is true it sends no further chunk,
    and notifies its destination. Waits at most `group.timeout_seconds` for each chunk. Collective over `group` (gloo):
    `destination` and `incoming` must match over the ranks.
    """
    outgoing_chunks = outgoing.split(CHUNK_BYTES)
    incoming_chunks = {rank: buffer.split(CHUNK_BYTES) for rank, buffer in incoming.items()}
    send = partial(dist.isend, group=group.handle, group_dst=destination)
    cancelled, cancelled_sources = False, set[int]()
    num_chunks = max(map(len, (outgoing_chunks, *incoming_chunks.values())))
    for index, chunk in zip_longest(range(num_chunks), outgoing_chunks):
        works = []
        if chunk is not None and not cancelled:
            cancelled = is_cancelled()
            works = [send(torch.tensor([not cancelled]))] + ([] if cancelled else [send(chunk)])
        for rank, buffers in incoming_chunks.items():
            if index < len(buffers) and rank not in cancelled_sources and not _receive(group, buffers[index], rank):
                cancelled_sources.add(rank)
        for work in filter(None, works):
            work.wait()
    return not cancelled and not cancelled_sources


def _receive(group: Group, buffer: Tensor, source: int) -> bool:
    """Receives a chunk into `buffer`; returns False if `source` has cancelled instead."""
    has_chunk = torch.empty(1, dtype=torch.bool)
    dist.recv(has_chunk, group=group.handle, group_src=source)
    if has_chunk:
        dist.recv(buffer, group=group.handle, group_src=source)
    return bool(has_chunk)


@contextmanager
def per_rank_rng(group: Group, device: torch.device) -> Iterator[None]:
    """Gives each rank of `group` its own random numbers inside the block, and restores the shared state afterwards.
    Torch's CPU generator must be in the same state on all ranks on entry. The seed depends on that state alone, so that
    a repeated forward pass (activation checkpointing, a resumed run) samples the same numbers. Sends nothing."""
    if group.size == 1:
        yield
        return
    seed = int(torch.randint(2**48, ()))
    with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type="cuda"):
        torch.manual_seed(seed * group.size + group.rank)
        yield


def has_fast_bf16(device: torch.device) -> bool:
    """Whether training in bf16 is faster than in fp32: on GPUs since Ampere, and on CPUs with AMX or AVX-512 for bf16
    (measured: products 7 and 2.4 times as fast, the demo's whole headless step 1.6 and 1.5 times). False for a CPU
    whose capabilities torch cannot detect."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return device.type == "cpu" and any(map(capabilities.get, ("amx_bf16", "avx512_bf16")))
