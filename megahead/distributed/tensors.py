"""Tensor sources that are read in blocks of rows, and tensors whose rows are sharded over ranks."""

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
"""Rows of a block: 64 MiB of 1,024 features. A multiple of the 16 random numbers that torch generates at a time."""


class TensorSource(Protocol):
    """A source of full CPU tensors by name. Raises an error for a missing or unsuitable tensor."""

    def read(self, name: str, /) -> Tensor:
        """The full tensor."""

    def blocks(self, name: str, /) -> Iterator[Tensor]:
        """The full tensor in consecutive parts along dim 0."""


@dataclass(frozen=True)
class FullTensors:
    """The tensors that a function reads, each as one block."""

    read_tensor: Callable[[str], Tensor]

    def read(self, name: str, /) -> Tensor:
        return self.read_tensor(name)

    def blocks(self, name: str, /) -> Iterator[Tensor]:
        yield self.read_tensor(name)


@dataclass(frozen=True)
class MappedTensors:
    """Tensors of several sources under other names."""

    find_source: Callable[[str], tuple[TensorSource, str]]
    """Maps a name to a source, and to the tensor's name in that source."""

    def read(self, name: str, /) -> Tensor:
        source, source_name = self.find_source(name)
        return source.read(source_name)

    def blocks(self, name: str, /) -> Iterator[Tensor]:
        source, source_name = self.find_source(name)
        return source.blocks(source_name)


@dataclass(frozen=True)
class FiniteTensors:
    """The tensors of `source`, with a CheckpointError for one that has NaN or infinity."""

    source: TensorSource
    path: Path
    """The source's file or folder, for the error."""

    def read(self, name: str, /) -> Tensor:
        return next(finite_blocks(iter([self.source.read(name)]), self.path, name))

    def blocks(self, name: str, /) -> Iterator[Tensor]:
        return finite_blocks(self.source.blocks(name), self.path, name)


def finite_blocks(blocks: Iterable[Tensor], path: object, name: str) -> Iterator[Tensor]:
    """Yields the blocks of the tensor `name` in `path` before the first one with NaN or infinity, if any; then counts
    these values in all further blocks and raises a CheckpointError."""
    num_nonfinite = 0
    for block in blocks:
        if num_nonfinite or not is_finite(block):
            num_nonfinite += block.numel() - int(block.isfinite().sum())
        else:
            yield block
    if num_nonfinite:
        problem = f"{num_nonfinite:,} of {name} {'is' if num_nonfinite == 1 else 'are'} NaN or infinite"
        raise CheckpointError(
            f"`{path}` must hold finite numbers only, but {problem}; use weights that were saved before."
        )


def require_finite(tensors: Iterable[tuple[str, Tensor]], path: object) -> None:
    """CheckpointError if a named tensor has NaN or infinity; those on `meta` are not checked."""
    for name, tensor in tensors:
        if not tensor.is_meta:
            deque(finite_blocks([tensor.detach()], path, name), maxlen=0)


def is_finite(tensor: Tensor) -> bool:
    """Whether all numbers are finite. Checks their sum first, and each number only if the sum is not finite."""
    return not tensor.is_floating_point() or bool(isfinite(tensor.sum())) or bool(tensor.isfinite().all())


def block_ranges(rows: int) -> Iterator[range]:
    """The row ranges of the blocks of `rows` rows; at least one."""
    return (range(first, min(first + BLOCK_ROWS, rows)) for first in range(0, max(rows, 1), BLOCK_ROWS))


def join_blocks(blocks: Iterable[Tensor], shape: Sequence[int]) -> Tensor:
    """Concatenates blocks to a tensor of `shape` without a second copy. A single block is returned unchanged."""
    remaining = iter(blocks)
    head = next(remaining)
    if head.shape == tuple(shape):
        return head
    full, row = head.new_empty(tuple(shape)), 0
    for block in chain([head], remaining):
        full[row : row + len(block)] = block
        row += len(block)
    return full


def copy_rows_(part: Tensor, blocks: Iterable[Tensor], start: int) -> None:
    """Copies rows `start` to `start + len(part)` of a tensor in blocks to `part`. Reads all blocks."""
    row = 0
    for block in blocks:
        lower, upper = max(start, row), min(start + len(part), row + len(block))
        if lower < upper:
            part[lower - start : upper - start] = block.detach()[lower - row : upper - row]
        row += len(block)


# A tensor whose rows are sharded round-robin over a group of R ranks: rank i mod R has row i at index i // R.


@dataclass(frozen=True)
class RoundRobinShard:
    """One rank's rows of a tensor that is sharded round-robin."""

    part: Tensor

    rows: int
    """Rows of the full tensor."""

    @property
    def shape(self) -> torch.Size:
        """The shape of the full tensor."""
        return torch.Size([self.rows, *self.part.shape[1:]])


def fill_shard_(part: Tensor, blocks: Iterable[Tensor], group: Group) -> None:
    """Fills `part` [n, ...] with this rank's rows of a tensor [V, ...] in consecutive blocks [b, ...].

    n is V / ranks, rounded up or down. Sends nothing: every rank reads all blocks, one at a time."""
    start = 0
    for block in blocks:
        rows = block[(group.rank - start) % group.size :: group.size]
        index = len(range(group.rank, start, group.size))
        part[index : index + len(rows)] = rows
        start += len(block)


def interleave_shards(parts: Sequence[Tensor]) -> Tensor:
    """The full tensor from the shards in rank order."""
    if len(parts) == 1:
        return parts[0]
    full = torch.empty(sum(len(part) for part in parts), *parts[0].shape[1:], dtype=parts[0].dtype)
    for rank, part in enumerate(parts):
        full[rank :: len(parts)] = part
    return full
