"""A group of ranks, as a value passed to the code that communicates; `Group()` is one rank and sends nothing."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

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

    def side_channel(self) -> Group:
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

    def barrier(self) -> None:
        """Waits until every rank has called it."""
        if self.size > 1:
            dist.barrier(group=self.handle)
