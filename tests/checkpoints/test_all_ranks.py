"""What fails on one rank, even while it is described, fails on all of them at once."""

from __future__ import annotations

import pytest

from megahead.checkpoints.format import run_on_all_ranks
from megahead.distributed.group import Group
from megahead.errors import CheckpointError
from support.on_ranks import on_ranks


def fail_on_the_last(group: Group) -> str:
    def act() -> None:
        if group.rank == group.size - 1:
            raise OSError("the disk is gone")

    def describe(error: Exception) -> str:
        raise FileNotFoundError("and so is what it is described by")

    with pytest.raises(CheckpointError) as error:
        run_on_all_ranks(group, act, describe)
    return str(error.value)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_error_that_cannot_be_described_is_told_as_it_is(ranks: int) -> None:
    assert on_ranks(ranks, fail_on_the_last) == ["the disk is gone"] * ranks
