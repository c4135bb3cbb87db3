"""Tensors in blocks: put together, cut and sharded round-robin they are what they are as a whole."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megahead.distributed import tensors as blocks
from megahead.distributed.group import Group
from megahead.distributed.tensors import (
    FullTensors,
    MappedTensors,
    block_ranges,
    copy_rows_,
    fill_shard_,
    join_blocks,
)

ROWS, WIDTH = 23, 3
WHOLE = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
SIZES = (1, 2, 5, 22, 23, 100)


def in_blocks(size: int) -> Iterator[Tensor]:
    return iter(WHOLE.split(size))


@pytest.mark.parametrize("size", SIZES)
def test_blocks_are_joined(size: int) -> None:
    assert torch.equal(join_blocks(in_blocks(size), WHOLE.shape), WHOLE)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64])
def test_a_tensor_without_rows_keeps_its_type(dtype: torch.dtype) -> None:
    empty = join_blocks([torch.empty(0, WIDTH, dtype=dtype)], (0, WIDTH))
    assert empty.dtype == dtype
    assert empty.shape == (0, WIDTH)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [range(23), range(4, 9), range(22, 23), range(0, 1)])
def test_some_rows_are_taken(size: int, rows: range) -> None:
    part = torch.full((len(rows), WIDTH), torch.nan)
    copy_rows_(part, in_blocks(size), rows.start)
    assert torch.equal(part, WHOLE[rows.start : rows.stop])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("ranks", [1, 2, 4, 30])
def test_every_rank_gets_its_rows(size: int, ranks: int) -> None:
    for rank in range(ranks):
        own = WHOLE[rank::ranks]
        part = torch.full_like(own, torch.nan)
        fill_shard_(part, in_blocks(size), Group(rank, ranks))
        assert torch.equal(part, own)


@pytest.mark.parametrize(("rows", "ends"), [(0, [0]), (1, [1]), (10, [10]), (11, [10, 11]), (30, [10, 20, 30])])
def test_blocks_cover_all_rows(monkeypatch: pytest.MonkeyPatch, rows: int, ends: list[int]) -> None:
    monkeypatch.setattr(blocks, "BLOCK_ROWS", 10)
    ranges = list(block_ranges(rows))
    assert [each.stop for each in ranges] == ends
    assert sum(map(len, ranges)) == rows


def test_other_names_are_of_the_same_tensors() -> None:
    named = MappedTensors(lambda name: (FullTensors({"there": WHOLE}.__getitem__), {"here": "there"}[name]))
    assert named.read("here") is WHOLE
    assert list(named.blocks("here")) == [WHOLE]
