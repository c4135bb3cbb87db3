"""Bytes that ranks pass on: all arrive, in any number of pieces, unless they are ended, which nobody waits for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megahead.distributed import group as passing
from megahead.distributed.group import Group, exchange_bytes
from support.on_ranks import on_ranks

SIZES = (100, 1, 250, 64)


def text(rank: int) -> Tensor:
    return torch.arange(SIZES[rank]).mul(rank + 3).to(torch.uint8)


def pass_to(group: Group, keepers: tuple[int, ...], ended: tuple[int, ...]) -> tuple[bool, list[bool]]:
    """Whether all came, and what did."""
    passing.CHUNK_BYTES = 64
    wards = [rank for rank, keeper in enumerate(keepers) if keeper == group.rank]
    places = {ward: torch.zeros(SIZES[ward], dtype=torch.uint8) for ward in wards}
    channel = group.new_gloo_group()
    came = exchange_bytes(channel, text(group.rank), keepers[group.rank], places, lambda: group.rank in ended)
    return came, [torch.equal(places[ward], text(ward)) for ward in wards]


@pytest.mark.parametrize("keepers", [(1, 2, 3, 0), (1, 0, 3, 2), (1, 0, 0, 1), (2, 2, 3, 0)], ids=str)
def test_all_bytes_arrive(keepers: tuple[int, ...]) -> None:
    results = on_ranks(4, pass_to, keepers, ())
    assert all(came and all(same) for came, same in results)
    assert sum(len(same) for _, same in results) == 4


def test_who_ends_is_not_waited_for() -> None:
    assert on_ranks(4, pass_to, (1, 2, 3, 0), (2,)) == [
        (True, [True]),
        (True, [True]),
        (False, [True]),
        (False, [False]),
    ]
