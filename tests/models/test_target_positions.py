"""Targets as a list of positions, and as a table with slots for each row."""

from __future__ import annotations

import pytest
import torch

from megahead.models.documents import TargetPositions

INDEX = torch.tensor([1, 3, 4, 11])
"""Of three rows of five tokens: three, none, and one."""


@pytest.mark.parametrize("most", [3, 4, None])
def test_spread_and_gather_are_inverse_and_rows_keep_their_targets(most: int | None) -> None:
    targets = TargetPositions(INDEX, 3, 5, most)
    x_BTD = torch.randn(3, 5, 2)
    taken = targets.select(x_BTD)
    assert torch.equal(taken, torch.stack([x_BTD[0, 1], x_BTD[0, 3], x_BTD[0, 4], x_BTD[2, 1]]))
    spread = targets.pad(taken)
    assert spread.shape == (3, most or 5, 2)
    assert torch.equal(spread[0, :3], taken[:3])
    assert torch.equal(spread[2, 0], taken[3])
    assert not spread[1].any()
    assert torch.equal(targets.unpad(spread), taken)


def test_what_is_the_same_in_all_rows_is_taken_by_the_place_in_the_row() -> None:
    x_1TD = torch.randn(1, 5, 2)
    targets = TargetPositions(INDEX, 3, 5)
    assert torch.equal(targets.select(x_1TD), targets.select(x_1TD.expand(3, 5, 2)))


def test_a_mask_has_the_lines_of_the_targets_and_unused_slots_see_everything() -> None:
    mask_BTT = torch.rand(3, 5, 5, generator=torch.Generator().manual_seed(0)) > 0.5
    mask_BTT |= torch.eye(5, dtype=torch.bool)
    lines = TargetPositions(INDEX, 3, 5, 3).mask(mask_BTT)
    assert torch.equal(lines[0], mask_BTT[0, [1, 3, 4]])
    assert torch.equal(lines[2, 0], mask_BTT[2, 1])
    assert lines[1].all()
    assert lines[2, 1:].all()
