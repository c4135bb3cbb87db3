"""The softmax over candidates split over ranks: value, gradients and scores of one rank, in float64."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from megahead.config.objective import ChunkSize
from megahead.distributed.group import Group
from megahead.losses import fused_softmax
from megahead.losses.candidates import Candidates
from megahead.losses.scores import Dot
from megahead.losses.softmax import CandidateShard, Softmax, candidate_loss_reference
from support.on_ranks import on_ranks

OUTPUTS, FEATURES, TEMPERATURE = 23, 5, 0.7


def problem(count: int, biased: bool, scale: float = 1.0) -> tuple[Tensor, Tensor, Candidates]:
    g = torch.Generator().manual_seed(count)
    outputs = scale * torch.randn(OUTPUTS, FEATURES, dtype=torch.float64, generator=g)
    rows = torch.randn(count, FEATURES, dtype=torch.float64, generator=g)
    own = torch.randint(count, (OUTPUTS,), generator=g)
    bias = torch.randn(count, dtype=torch.float64, generator=g) if biased else None
    return outputs, rows, Candidates(None, bias, own)


def shard_of(rows_UD: Tensor, group: Group) -> tuple[CandidateShard, Tensor]:
    """The rank's shard, and its table whose last rows hold nonsense where candidates do not divide evenly."""
    width = -(-rows_UD.shape[0] // group.size)
    shard = CandidateShard.of(rows_UD.shape[0], width, group)
    table = rows_UD.new_full((width, FEATURES), 77.0)
    table[: shard.count] = rows_UD[shard.first : shard.first + shard.count]
    return shard, table


def split(group: Group, count: int, biased: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    outputs, rows, candidates = problem(count, biased, scale)
    shard, table = shard_of(rows, group)
    outputs.requires_grad_()
    table.requires_grad_()
    four_outputs = ChunkSize(8 * 4 * table.shape[0], 1, 1)
    with mock.patch.object(fused_softmax, "CPU_CHUNKS", four_outputs):
        loss = Softmax(outputs, table, candidates, Dot(TEMPERATURE), shard).loss()
    (3 * loss).backward()
    assert outputs.grad is not None
    assert table.grad is not None
    assert not table.grad[shard.count :].any()
    return loss.detach(), outputs.grad, table.grad[: shard.count]


@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("count", [1, 7, 16])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_value_and_gradients_equal_the_reference(size: int, count: int, biased: bool, scale: float) -> None:
    outputs, rows, candidates = problem(count, biased, scale)
    outputs.requires_grad_()
    rows.requires_grad_()
    reference = candidate_loss_reference(outputs, rows, candidates, Dot(TEMPERATURE))
    (3 * reference).backward()
    results = on_ranks(size, split, count, biased, scale)
    for loss, grad_outputs, _ in results:
        torch.testing.assert_close(loss, reference.detach(), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(grad_outputs, outputs.grad, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(torch.cat([grad for *_, grad in results]), rows.grad, rtol=1e-10, atol=1e-10 * scale)


def gradient_of_the_bias(group: Group, count: int) -> Tensor:
    """Of a learned bias of all candidates, which every rank has whole."""
    outputs, rows, candidates = problem(count, True)
    shard, table = shard_of(rows, group)
    assert candidates.bias_U is not None
    bias, candidates = candidates.bias_U.requires_grad_(), replace(candidates, target_logit_has_bias=True)
    with mock.patch.object(fused_softmax, "CPU_CHUNKS", ChunkSize(8 * 4 * table.shape[0], 1, 1)):
        loss = Softmax(outputs, table, candidates, Dot(TEMPERATURE), shard).loss()
    return torch.autograd.grad(3 * loss, bias)[0]


@pytest.mark.parametrize("count", [7, 16])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_has_the_gradient_of_all_learned_biases(size: int, count: int) -> None:
    outputs, rows, candidates = problem(count, True)
    assert candidates.bias_U is not None
    bias, candidates = candidates.bias_U.requires_grad_(), replace(candidates, target_logit_has_bias=True)
    reference = candidate_loss_reference(outputs, rows, candidates, Dot(TEMPERATURE))
    (expected,) = torch.autograd.grad(3 * reference, bias)
    for whole in on_ranks(size, gradient_of_the_bias, count):
        torch.testing.assert_close(whole, expected, rtol=1e-10, atol=1e-10)


def scores(group: Group, count: int) -> tuple[float, int, int]:
    outputs, rows, candidates = problem(count, True)
    shard, table = shard_of(rows, group)
    result = Softmax(outputs, table, candidates, Dot(TEMPERATURE), shard).sums()
    return result.loss, result.correct, result.targets


@pytest.mark.parametrize("size", [1, 2, 4])
def test_scores_equal_one_rank(size: int) -> None:
    expected = Softmax(*problem(7, True), Dot(TEMPERATURE)).sums()
    assert expected.correct > 0
    for loss, correct, targets in on_ranks(size, scores, 7):
        assert loss == pytest.approx(expected.loss, rel=1e-12)
        assert (correct, targets) == (expected.correct, expected.targets)


def without_targets(group: Group) -> tuple[float, bool]:
    outputs, rows = torch.zeros(0, FEATURES, requires_grad=True), torch.ones(2, FEATURES, requires_grad=True)
    none = Candidates(None, None, torch.zeros(0, dtype=torch.int64))
    loss = Softmax(outputs, rows, none, Dot(), CandidateShard.of(0, 2, group)).loss()
    loss.backward()
    return float(loss), rows.grad is not None and not rows.grad.any()


def test_no_targets_give_zero_connected_to_the_inputs() -> None:
    assert on_ranks(2, without_targets) == [(0.0, True)] * 2
