"""Candidates in other shapes mean the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megahead.objectives import (
    Candidates,
    candidate_loss,
    candidate_loss_reference,
    unique_candidates,
    vocabulary_candidates,
)


@pytest.mark.parametrize("multiple", [1, 5, 16])
def test_padded_candidates_give_the_same_loss_and_gradients(multiple: int) -> None:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(40, (30,), generator=generator)
    outputs = torch.randn(30, 8, generator=generator, requires_grad=True)
    table = torch.randn(40, 8, generator=generator, requires_grad=True)
    results = []
    for candidates in (unique_candidates(targets), unique_candidates(targets).padded(multiple)):
        assert candidates.ids_U is not None
        loss = candidate_loss(outputs, table[candidates.ids_U], candidates)
        results.append((loss, *torch.autograd.grad(loss, [outputs, table])))
        rows = candidates.ids_U.numel()
    assert rows % multiple == 0
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_the_whole_vocabulary_is_not_padded() -> None:
    candidates = vocabulary_candidates(torch.tensor([1, 2]))
    assert candidates.padded(512) is candidates
    biased = replace(candidates, bias_U=torch.tensor([0.0, 0.0, -torch.inf]))
    assert biased.padded(512) is biased


def test_all_tensors_move_and_the_constant_stays() -> None:
    candidates = Candidates(*(torch.arange(3) for _ in range(4)), constant=0.5)  # type: ignore[misc]
    moved = candidates.to(torch.device("meta"))
    assert all(getattr(moved, name).is_meta for name in ("ids_U", "bias_U", "positive_N", "positive_bias_U"))
    assert moved.constant == 0.5
    alone = Candidates(None, None, torch.arange(3)).to(torch.device("meta"))
    assert (alone.ids_U, alone.bias_U, alone.positive_N.is_meta) == (None, None, True)


def test_the_constant_is_part_of_the_loss_by_every_way() -> None:
    outputs, rows = torch.randn(3, 4), torch.randn(5, 4)
    plain = Candidates(None, None, torch.tensor([0, 4, 2]))
    shifted = replace(plain, constant=2.5)
    for way in (candidate_loss, candidate_loss_reference):
        torch.testing.assert_close(way(outputs, rows, shifted), way(outputs, rows, plain) + 2.5)
    none = replace(shifted, positive_N=torch.zeros(0, dtype=torch.int64))
    assert candidate_loss(outputs[:0], rows, none) == 2.5
