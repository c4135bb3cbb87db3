"""Outputs whose losses count more or less often: as often as they say, and alike by every way of computing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megahead.config.objective import ChunkSize, ObjectiveConfig
from megahead.distributed.group import Group
from megahead.losses import fused_softmax
from megahead.losses.candidates import Candidates
from megahead.losses.contrastive import build_objective
from megahead.losses.scores import Dot, Harmonic, Score
from megahead.losses.softmax import CandidateShard, Softmax, candidate_loss, candidate_loss_reference, streamed_sums
from support.on_ranks import on_ranks
from support.row_kernel_cases import assert_rounded_once, interpret, on_device, solved

N, U, D = 23, 17, 24
SCORE = Dot(0.7)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where the kernel runs; on CPUs in Triton's interpreter."""
    pytest.importorskip("triton")
    return on_device(request.param, monkeypatch)


def problem(
    dtype: torch.dtype = torch.float64, apart: bool = False, device: torch.device | None = None
) -> tuple[list[Tensor], Candidates]:
    """[outputs, rows, a bias] and candidates with weights up to 50. The bias is learned, or with `apart` positives have
    another one."""
    generator = torch.Generator().manual_seed(0)
    outputs, rows, bias = (torch.randn(*size, generator=generator) for size in ((N, D), (U, D), (U,)))
    weight_N = (50 / torch.randint(1, 51, (N,), generator=generator)).to(device)
    target_N, bias = torch.randint(U, (N,), generator=generator).to(device), bias.to(device, torch.float64)
    inputs = [x.to(device, dtype).requires_grad_() for x in (outputs, rows)]
    if apart:
        return inputs, Candidates(None, bias, target_N, bias / 2, weight_N=weight_N)
    return [*inputs, bias.requires_grad_()], Candidates(None, bias, target_N, None, True, weight_N)


def exact(inputs: list[Tensor], candidates: Candidates, score: Score = SCORE) -> list[Tensor]:
    copies = [x.detach().double().requires_grad_() for x in inputs]
    bias_U = candidates.bias_U if len(copies) == 2 else copies[2]
    return solved(candidate_loss_reference(*copies[:2], replace(candidates, bias_U=bias_U), score), copies)


def small_chunks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fused_softmax, "CPU_CHUNKS", ChunkSize(1, min_outputs=5, multiple=1))


def test_an_output_of_weight_three_is_one_that_is_there_three_times() -> None:
    inputs, candidates = problem()
    often_N = torch.arange(N) % 4
    outputs, rows, _ = inputs
    whole = replace(candidates, weight_N=None, target_N=candidates.target_N.repeat_interleave(often_N))
    repeated = candidate_loss_reference(outputs.repeat_interleave(often_N, 0), rows, whole, SCORE)
    weighted = candidate_loss_reference(outputs, rows, replace(candidates, weight_N=often_N.float()), SCORE)
    for mine, expected in zip(solved(weighted, inputs), solved(repeated, inputs), strict=True):
        torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize("score", [SCORE, Harmonic(0.4)], ids=["dot", "harmonic"])
@pytest.mark.parametrize("apart", [False, True])
def test_chunk_by_chunk_it_equals_the_reference(monkeypatch: pytest.MonkeyPatch, score: Score, apart: bool) -> None:
    inputs, candidates = problem(apart=apart)
    small_chunks(monkeypatch)
    loss = candidate_loss(*inputs[:2], candidates, score)
    for mine, expected in zip(solved(loss, inputs), exact(inputs, candidates, score), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("apart", [False, True])
def test_by_the_kernel_it_equals_the_reference(device: torch.device, apart: bool) -> None:
    inputs, candidates = problem(torch.float32, apart, device)
    loss = candidate_loss(*inputs[:2], candidates, SCORE)
    for mine, expected in zip(solved(loss, inputs), exact(inputs, candidates), strict=True):
        torch.testing.assert_close(mine, expected, rtol=2e-5, atol=1e-4)


def test_by_the_kernel_in_half_precision_gradients_are_within_a_few_roundings(device: torch.device) -> None:
    inputs, candidates = problem(torch.bfloat16, device=device)
    loss = candidate_loss(*inputs[:2], candidates, SCORE)
    assert loss.dtype == torch.float32
    assert_rounded_once(solved(loss, inputs), exact(inputs, candidates), torch.bfloat16, roundings=3)


def split(group: Group, kernel: bool) -> tuple[list[Tensor], tuple[float, ...]]:
    """(loss, gradients by outputs, by this rank's rows and by the bias), and evaluation sums."""
    with pytest.MonkeyPatch.context() as patch:
        (interpret if kernel else small_chunks)(patch)
        (outputs, rows, bias), candidates = problem(torch.float32 if kernel else torch.float64)
        shard = CandidateShard.of(U, -(-U // group.size), group)
        table = rows.new_zeros(shard.width, D)
        table[: shard.count] = rows[shard.first : shard.first + shard.count].detach()
        table.requires_grad_()
        loss = Softmax(outputs, table, candidates, SCORE, shard).loss()
        sums = Softmax(outputs, table, candidates, SCORE, shard).sums()
        value, of_outputs, of_rows, of_bias = solved(loss, [outputs, table, bias])
        return [value, of_outputs, of_rows[: shard.count], of_bias], tuple(sums[:4])


@pytest.mark.parametrize(("ranks", "kernel"), [(2, False), (4, False), (2, True)])
def test_split_over_ranks_it_equals_the_reference(ranks: int, kernel: bool) -> None:
    if kernel:
        pytest.importorskip("triton")
    inputs, candidates = problem()
    expected = exact(inputs, candidates)
    sums = Softmax(*inputs[:2], candidates, SCORE).sums()
    results = on_ranks(ranks, split, kernel)
    of_rows = torch.cat([found[2] for found, _ in results])
    for (loss, of_outputs, _, of_bias), mine in results:
        for value, true in zip((loss, of_outputs, of_rows, of_bias), expected, strict=True):
            torch.testing.assert_close(value, true, rtol=2e-5, atol=1e-4)
        assert mine == pytest.approx(tuple(sums[:4]), rel=1e-5)


def test_evaluation_counts_losses_by_weight_and_targets_once_also_block_by_block() -> None:
    (outputs, rows, bias), candidates = problem()
    log_p_NU = (outputs @ rows.T / 0.7 + bias).log_softmax(1)
    weight_N, own_N = candidates.weight_N, log_p_NU.gather(1, candidates.target_N[:, None])[:, 0]
    assert weight_N is not None
    found = Softmax(outputs, rows, candidates, SCORE).sums()
    assert found.loss == pytest.approx(-float((weight_N * own_N).sum().detach()))
    assert found.correct == int((log_p_NU.argmax(1) == candidates.target_N).sum())
    assert (found.targets, found.weight) == (N, pytest.approx(float(weight_N.sum())))
    blocks = streamed_sums(outputs, rows.split(5), candidates, SCORE)
    assert blocks[:4] == pytest.approx(found[:4], rel=1e-5)
    even = Softmax(outputs, rows, replace(candidates, weight_N=None), SCORE).sums()
    assert even.weight == even.targets == N


@pytest.mark.parametrize("fields", [{}, {"bias": "corrected"}, {"bias": "corrected", "max_candidates": 4}], ids=str)
def test_what_an_objective_subtracts_of_a_positive_is_weighed_with_it(fields: dict[str, Any]) -> None:
    """Twice the weight, twice the loss; weights of one, no weights."""
    rule = build_objective(ObjectiveConfig(**fields), U, torch.arange(U) + 1)
    (outputs, rows, _), candidates = problem()
    targets_N, weight_N = candidates.target_N, candidates.weight_N
    assert weight_N is not None

    def loss(weight_N: Tensor | None) -> float:
        found = rule.candidate_set(targets_N).candidates(targets_N, weight_N)
        return float(candidate_loss(outputs.detach(), rows.detach()[found.ids_U], found))

    assert loss(2 * weight_N) == pytest.approx(2 * loss(weight_N))
    assert loss(torch.ones(N)) == pytest.approx(loss(None))
    half = torch.arange(N) < N // 2
    parts = [loss(weight_N * part) for part in (half, ~half)]
    assert sum(parts) == pytest.approx(loss(weight_N))


def test_weights_go_with_the_batch_to_another_device() -> None:
    _, candidates = problem()
    moved = candidates.to(torch.device("meta"))
    assert moved.weight_N is not None
    assert moved.weight_N.is_meta
    assert candidates.pad_to_multiple(512).weight_N is candidates.weight_N
