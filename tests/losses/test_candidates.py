"""Candidates in other shapes mean the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megahead.losses.candidates import Candidates, all_rows_as_candidates, unique_candidates
from megahead.losses.softmax import candidate_loss, candidate_loss_reference


@pytest.mark.parametrize("multiple", [1, 5, 16])
def test_padded_candidates_give_the_same_loss_and_gradients(multiple: int) -> None:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(40, (30,), generator=generator)
    outputs = torch.randn(30, 8, generator=generator, requires_grad=True)
    table = torch.randn(40, 8, generator=generator, requires_grad=True)
    results = []
    for candidates in (unique_candidates(targets), unique_candidates(targets).pad_to_multiple(multiple)):
        assert candidates.ids_U is not None
        loss = candidate_loss(outputs, table[candidates.ids_U], candidates)
        results.append((loss, *torch.autograd.grad(loss, [outputs, table])))
        rows = candidates.ids_U.numel()
        assert torch.equal(candidates.ids_U.unique(), targets.unique())  # no other rows of the table are used
    assert rows % multiple == 0
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_the_whole_vocabulary_is_not_padded() -> None:
    candidates = all_rows_as_candidates(torch.tensor([1, 2]))
    assert candidates.pad_to_multiple(512) is candidates
    biased = replace(candidates, bias_U=torch.tensor([0.0, 0.0, -torch.inf]))
    assert biased.pad_to_multiple(512) is biased


def test_all_tensors_move_and_the_rest_stays() -> None:
    candidates = Candidates(*(torch.arange(3) for _ in range(4)), target_logit_has_bias=True)  # type: ignore[misc]
    moved = candidates.to(torch.device("meta"))
    assert all(getattr(moved, name).is_meta for name in ("ids_U", "bias_U", "target_N", "as_target_bias_U"))
    assert moved.target_logit_has_bias
    alone = Candidates(None, None, torch.arange(3)).to(torch.device("meta"))
    assert (alone.ids_U, alone.bias_U, alone.target_N.is_meta) == (None, None, True)


@pytest.mark.parametrize("apart", [False, True])
def test_a_bias_in_the_numerator_is_that_of_each_positive_as_often_as_it_counts(apart: bool) -> None:
    outputs, rows, bias = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5, dtype=torch.float64)
    own, weights = torch.tensor([0, 4, 2]), torch.tensor([1.0, 2.0, 0.5])
    plain = Candidates(None, bias, own, bias / 2 if apart else None, weight_N=weights)
    subtracted = float((weights * (bias / 2 if apart else bias)[own]).sum())
    for way in (candidate_loss, candidate_loss_reference):
        mine = way(outputs, rows, replace(plain, target_logit_has_bias=True))
        torch.testing.assert_close(float(mine), float(way(outputs, rows, plain)) - subtracted, rtol=1e-5, atol=1e-5)


def test_without_outputs_a_learned_bias_has_a_gradient_of_zeros() -> None:
    bias = torch.tensor([1.0, -torch.inf], requires_grad=True)
    none = Candidates(None, bias, torch.zeros(0, dtype=torch.int64), target_logit_has_bias=True)
    loss = candidate_loss(torch.zeros(0, 4), torch.randn(2, 4), none)
    loss.backward()
    assert (loss.item(), bias.grad.tolist()) == (0.0, [0.0, 0.0])
