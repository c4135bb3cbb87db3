"""Rows reach whoever asks, and the sums of their gradients reach their owners."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megahead.distributed import Group
from megahead.table import plan_rows
from megahead.table.exchange import gradients_to_owners, rows_from_owners
from support.on_ranks import on_ranks

VOCABULARY, WIDTH = 23, 3


def wanted(rank: int) -> Tensor:
    """Ids of a rank, some of them several times; the last of four ranks wants one row alone."""
    if rank == 3:
        return torch.tensor([5])
    return torch.randint(0, VOCABULARY, (12,), generator=torch.Generator().manual_seed(rank))


def table() -> Tensor:
    return torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(9))


def gradients(rank: int) -> Tensor:
    count = len(wanted(rank).unique())
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(100 + rank))


def exchanged(group: Group) -> tuple[bool, bool, bool]:
    plan = plan_rows(wanted(group.rank), group.side_channel(), num_lookups=2)
    own = table()[group.rank :: group.size][plan.owned_O]
    rows = rows_from_owners(own, plan, group)
    sums = [gradients_to_owners(gradients(group.rank), plan, group) for _ in range(2)]
    whole = torch.zeros(VOCABULARY, WIDTH)
    for rank in range(group.size):
        whole[wanted(rank).unique()] += gradients(rank)
    expected = whole[group.rank :: group.size][plan.owned_O]
    asked_for = set(torch.cat([wanted(rank) for rank in range(group.size)]).tolist())
    owned = {int(place) * group.size + group.rank for place in plan.owned_O}
    return (
        torch.equal(rows, table()[wanted(group.rank).unique()]),
        torch.equal(sums[0], expected) and torch.equal(*sums),
        owned == {i for i in asked_for if i % group.size == group.rank},
    )


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_rows_come_and_gradients_are_added_in_the_order_of_ranks(ranks: int) -> None:
    assert on_ranks(ranks, exchanged) == [(True, True, True)] * ranks
