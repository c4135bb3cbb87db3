"""Rows reach whoever asks, and the sums of their gradients reach their owners."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megahead.distributed.group import Group, Mesh
from megahead.sharded_embedding.table import gradients_to_owners, plan_rows, rows_from_owners
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
    plan = plan_rows(wanted(group.rank), group.new_gloo_group(), num_passes=2)
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


def shared(group: Group) -> tuple[bool, bool, int]:
    """Two pairs of ranks: each pair needs the same rows, and shares them."""
    mesh = Mesh.build(group, 2)
    pair, ids = mesh.data_group.rank, wanted(mesh.data_group.rank)
    plan = plan_rows(ids, group.new_gloo_group(), tensor_group=mesh.tensor_group)
    rows = rows_from_owners(table()[group.rank :: 4][plan.owned_O], plan, group)
    mine = gradients(pair) * (1 + mesh.tensor_group.rank)
    sums = gradients_to_owners(mine, plan, group)
    whole = torch.zeros(VOCABULARY, WIDTH)
    for other in range(2):
        whole[wanted(other).unique()] += gradients(other) + 2 * gradients(other)
    expected = whole[group.rank :: 4][plan.owned_O]
    return torch.equal(rows, table()[ids.unique()]), torch.allclose(sums, expected), sum(plan.recv_counts)


def test_ranks_that_need_the_same_rows_ask_for_each_once() -> None:
    outcomes = on_ranks(4, shared)
    assert all(came and summed for came, summed, _ in outcomes)
    distinct = [len(wanted(pair).unique()) for pair in range(2)]
    asked = [count for _, _, count in outcomes]
    assert [sum(asked[:2]), sum(asked[2:])] == distinct
    assert max(asked[0] - asked[1], asked[2] - asked[3]) == 1  # one of them is odd


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_rows_come_and_gradients_are_added_in_the_order_of_ranks(ranks: int) -> None:
    assert on_ranks(ranks, exchanged) == [(True, True, True)] * ranks
