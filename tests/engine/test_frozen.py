"""What is kept of frozen parameters comes back to the last bit, whatever its shape and however many ranks share it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megahead.distributed.group import Group
from megahead.engine.state import FrozenWeights
from support.on_ranks import on_ranks

SHAPES = [(), (1,), (3,), (5, 7), (4, 2, 6)]


def kept_and_read(group: Group) -> tuple[bool, int]:
    """Whether all came back, and how many numbers this rank held."""
    frozen = FrozenWeights(group, torch.device("cpu"))
    torch.manual_seed(0)
    whole = [torch.randn(shape) for shape in SHAPES]
    parameters = [nn.Parameter(value.bfloat16(), requires_grad=False) for value in whole]
    assert frozen.read(parameters[0]) is None
    for parameter, value in zip(parameters, whole, strict=True):
        frozen.store(parameter, value)
    back = [frozen.read(parameter) for parameter in parameters]
    same = all(value is not None and torch.equal(value, given) for value, given in zip(back, whole, strict=True))
    return same, sum(part.numel() for part, _ in frozen._shards.values())


@pytest.mark.parametrize(("ranks", "held"), [(1, 88), (2, 1 + 1 + 2 + 18 + 24), (4, 1 + 1 + 1 + 9 + 12)])
def test_numbers_of_any_shape_come_back(ranks: int, held: int) -> None:
    assert on_ranks(ranks, kept_and_read) == [(True, held)] * ranks
