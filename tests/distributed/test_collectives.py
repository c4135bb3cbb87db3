"""Collectives in both directions: what each gives, and that its backward is the transpose of its forward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megahead.distributed.group import (
    Group,
    Mesh,
    copy_to_group,
    gather_from_group,
    per_rank_rng,
    reduce_from_group,
    reduce_scatter_to_group,
    scatter_to_group,
)
from support.on_ranks import on_ranks

SIZES = [1, 2, 4]


def numbers(rank: int, rows: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(10 * rank + seed)
    return torch.randn(rows, 3, dtype=torch.float64, generator=generator)


def both_ways(group: Group, collective: Callable[[Tensor, Group], Tensor], rows: int) -> tuple[Tensor, Tensor]:
    x = numbers(group.rank, rows).requires_grad_()
    y = collective(x, group)
    y.backward(numbers(group.rank, y.shape[0], seed=5))
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize("size", SIZES)
def test_sum_forward(size: int) -> None:
    for rank, (y, grad) in enumerate(on_ranks(size, both_ways, reduce_from_group, 2)):
        torch.testing.assert_close(y, sum(numbers(r, 2) for r in range(size)))
        assert torch.equal(grad, numbers(rank, 2, seed=5))


@pytest.mark.parametrize("size", SIZES)
def test_sum_backward(size: int) -> None:
    for rank, (y, grad) in enumerate(on_ranks(size, both_ways, copy_to_group, 2)):
        assert torch.equal(y, numbers(rank, 2))
        torch.testing.assert_close(grad, sum(numbers(r, 2, seed=5) for r in range(size)))


def along(group: Group, collective: Callable[[Tensor, Group, int], Tensor], dim: int, whole: bool) -> list[Tensor]:
    """Given, taken, and their gradients, of a [2, 4, 3] value that is whole where `whole`, else a rank's slice."""
    shape = [2 * group.size, 4 * group.size, 3]
    shape[dim] //= 1 if whole else group.size
    generator = torch.Generator().manual_seed(group.rank)
    x = torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()
    y = collective(x, group, dim)
    grad = torch.randn(y.shape, dtype=torch.float64, generator=generator)
    y.backward(grad)
    assert x.grad is not None
    return [x.detach(), y.detach(), grad, x.grad]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("size", SIZES)
def test_sum_scatter(size: int, dim: int) -> None:
    given, taken, grads, returned = zip(*on_ranks(size, along, reduce_scatter_to_group, dim, True), strict=True)
    torch.testing.assert_close(torch.cat(taken, dim), sum(given))
    assert all(torch.equal(grad, torch.cat(grads, dim)) for grad in returned)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("size", SIZES)
def test_split_gives_slices_and_gathers_backward(size: int, dim: int) -> None:
    for rank, (given, taken, _, returned) in enumerate(results := on_ranks(size, along, scatter_to_group, dim, True)):
        assert torch.equal(taken, given.chunk(size, dim)[rank])
        assert torch.equal(returned, torch.cat([grad for _, _, grad, _ in results], dim))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("size", SIZES)
def test_join_gathers_and_gives_each_its_slice_of_a_gradient_that_all_have(size: int, dim: int) -> None:
    for rank, (_, taken, grad, returned) in enumerate(results := on_ranks(size, along, gather_from_group, dim, False)):
        assert torch.equal(taken, torch.cat([given for given, *_ in results], dim))
        assert torch.equal(returned, grad.chunk(size, dim)[rank])


def draws(group: Group) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(3)
    alike, apart = [torch.rand(4)], []
    state = torch.get_rng_state()
    for _ in range(2):
        torch.set_rng_state(state)
        with per_rank_rng(group, torch.device("cpu")):
            apart.append(torch.rand(4))
    alike.append(torch.rand(4))
    return alike, apart


def test_random_numbers_are_apart_inside_alike_around_and_the_same_when_repeated() -> None:
    (alike0, apart0), (alike1, apart1) = on_ranks(2, draws)
    for mine, theirs in zip(alike0, alike1, strict=True):
        assert torch.equal(mine, theirs)
    assert not torch.equal(alike0[0], alike0[1])
    assert not torch.equal(apart0[0], apart1[0])
    assert torch.equal(apart0[0], apart0[1])
    assert torch.equal(apart1[0], apart1[1])


def side_channels(group: Group) -> tuple[int, int]:
    """Sums of world ranks over two side channels of the data axis, used at once by different columns."""
    mesh = Mesh.build(group, 2)
    first, second = mesh.data_group.new_gloo_group(), mesh.data_group.new_gloo_group()
    return int(first.all_reduce_(torch.tensor(group.rank))), int(second.all_reduce_(torch.tensor(group.rank)))


def test_data_ranks_of_several_columns_have_side_channels_of_their_own() -> None:
    assert on_ranks(4, side_channels) == [(2, 2), (4, 4), (2, 2), (4, 4)]
