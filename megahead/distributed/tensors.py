"""Tensors that are read in blocks of rows, and tensors whose rows are sharded over ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import isfinite
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megahead.distributed.group import Group
from megahead.errors import CheckpointError

BLOCK_ROWS = 1 << 14
"""Rows of a block: 64 MiB of 1,024 features. A multiple of the 16 numbers that torch draws at once."""


class TensorSource(Protocol):
    """A source of full CPU tensors by name. The source raises an error for a missing or unsuitable tensor."""

    def read(self, name: str, /) -> Tensor:
        """The whole tensor."""

    def blocks(self, name: str, /) -> Iterator[Tensor]:
        """The same, in consecutive parts along dim 0."""


@dataclass(frozen=True)
class WholeTensors:
    """Tensors whose only block is the whole tensor."""

    function: Callable[[str], Tensor]

    def read(self, name: str, /) -> Tensor:
        return self.function(name)

    def blocks(self, name: str, /) -> Iterator[Tensor]:
        yield self.function(name)


@dataclass(frozen=True)
class RoutedTensors:
    """Tensors of several sources."""

    route: Callable[[str], tuple[TensorSource, str]]
    """From a name to its source, and the name that it has there."""

    def read(self, name: str, /) -> Tensor:
        source, there = self.route(name)
        return source.read(there)

    def blocks(self, name: str, /) -> Iterator[Tensor]:
        source, there = self.route(name)
        return source.blocks(there)


@dataclass(frozen=True)
class FiniteTensors:
    """The same tensors, which must hold finite numbers only: CheckpointError for the first that does not."""

    tensors: TensorSource
    place: Path
    """Their file or folder, for the error."""

    def read(self, name: str, /) -> Tensor:
        return next(finite_blocks(iter([self.tensors.read(name)]), self.place, name))

    def blocks(self, name: str, /) -> Iterator[Tensor]:
        return finite_blocks(self.tensors.blocks(name), self.place, name)


def finite_blocks(blocks: Iterable[Tensor], place: object, name: str) -> Iterator[Tensor]:
    """The same blocks of the tensor `name` in `place`. CheckpointError at the first block with NaN or infinity, which
    counts these values in all blocks."""
    others = 0
    for block in blocks:
        if others or not is_finite(block):
            others += block.numel() - int(block.isfinite().sum())
        else:
            yield block
    if others:
        found = f"{others:,} of {name} {'is' if others == 1 else 'are'} NaN or infinite"
        raise CheckpointError(
            f"`{place}` must hold finite numbers only, but {found}; use weights that were saved before."
        )


def require_finite(tensors: Iterable[tuple[str, Tensor]], place: object) -> None:
    """Checks named tensors as `finite_blocks` does, except those on `meta`."""
    for name, tensor in tensors:
        if not tensor.is_meta:
            deque(finite_blocks([tensor.detach()], place, name), maxlen=0)


def is_finite(tensor: Tensor) -> bool:
    """Whether all numbers are finite. Checks their sum first, and each number only if the sum is not finite."""
    return not tensor.is_floating_point() or bool(isfinite(tensor.sum())) or bool(tensor.isfinite().all())


def block_ranges(rows: int) -> Iterator[range]:
    """The row ranges of the blocks of `rows` rows; at least one."""
    return (range(first, min(first + BLOCK_ROWS, rows)) for first in range(0, max(rows, 1), BLOCK_ROWS))


def join_blocks(blocks: Iterable[Tensor], shape: Sequence[int]) -> Tensor:
    """Concatenates blocks to a tensor of `shape` without a second copy. A single block is returned as it is."""
    left = iter(blocks)
    head = next(left)
    if head.shape == tuple(shape):
        return head
    whole, row = head.new_empty(tuple(shape)), 0
    for block in chain([head], left):
        whole[row : row + len(block)] = block
        row += len(block)
    return whole


def copy_rows_(part: Tensor, blocks: Iterable[Tensor], first: int) -> None:
    """Copies the rows from `first` on of a tensor in blocks to `part`. Reads all blocks."""
    row = 0
    for block in blocks:
        lower, upper = max(first, row), min(first + len(part), row + len(block))
        if lower < upper:
            part[lower - first : upper - first] = block.detach()[lower - row : upper - row]
        row += len(block)


# A tensor whose rows are sharded round-robin over a group: rank i mod R has row i at index i // R.


@dataclass(frozen=True)
class RoundRobinShard:
    """One rank's shard of such a tensor."""

    part: Tensor

    rows: int
    """Rows of the whole tensor."""

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole tensor."""
        return torch.Size([self.rows, *self.part.shape[1:]])


def fill_shard_(part: Tensor, blocks: Iterable[Tensor], group: Group) -> None:
    """Fills `part` [n, ...] with this rank's rows of a tensor [V, ...] in consecutive blocks [b, ...].

    Without communication: every rank reads all blocks, one at a time. n is V / ranks, rounded up or down."""
    first = 0
    for block in blocks:
        own = block[(group.rank - first) % group.size :: group.size]
        place = len(range(group.rank, first, group.size))
        part[place : place + len(own)] = own
        first += len(block)


def interleave_shards(parts: Sequence[Tensor]) -> Tensor:
    """The whole tensor from the shards in rank order."""
    if len(parts) == 1:
        return parts[0]
    whole = torch.empty(sum(len(part) for part in parts), *parts[0].shape[1:], dtype=parts[0].dtype)
    for rank, part in enumerate(parts):
        whole[rank :: len(parts)] = part
    return whole
