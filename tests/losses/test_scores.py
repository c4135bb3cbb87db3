"""Scores other than the dot product: value and gradients by their definition, and the head without training."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor

from megahead.config.objective import ChunkSize, ObjectiveConfig
from megahead.losses import fused_softmax
from megahead.losses.candidates import Candidates, all_rows_as_candidates, log_unigram, unique_candidates
from megahead.losses.scores import SCORES, Cosine, Dot, Harmonic, Score
from megahead.losses.softmax import Softmax, candidate_loss, candidate_loss_reference, streamed_sums
from support.row_kernel_cases import assert_rounded_once, drawn, interpret, solved, truth

CPU = torch.device("cpu")
KINDS = [Dot(0.7), Cosine(0.1), Harmonic(0.25)]


def definition(score: Score, outputs: Tensor, rows: Tensor) -> Tensor:
    if isinstance(score, Cosine):
        return outputs @ rows.T / outputs.norm(dim=1, keepdim=True) / rows.norm(dim=1) / score.temperature
    if isinstance(score, Harmonic):
        return -(outputs[:, None] - rows).norm(dim=2).log() / score.temperature
    return outputs @ rows.T / score.temperature


def test_every_name_of_the_setting_has_a_score() -> None:
    assert set(get_args(ObjectiveConfig.model_fields["score"].annotation)) == SCORES.keys()


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("score", KINDS, ids=str)
def test_loss_and_gradients_are_those_of_the_definition_in_any_chunks(
    monkeypatch: pytest.MonkeyPatch, score: Score, apart: bool
) -> None:
    """`apart`: positives have biases of their own."""
    outputs, rows, candidates = drawn(23, 14, 6, torch.float64, CPU, apart)
    scores = definition(score, outputs, rows)
    own = candidates.target_N[:, None]
    positive = scores.gather(1, own)
    biased = scores + candidates.bias_U
    if candidates.as_target_bias_U is not None:
        biased = biased.scatter(1, own, positive + candidates.as_target_bias_U[own])
    exact = solved((biased.logsumexp(1) - positive[:, 0]).sum(), [outputs, rows])
    for way in (candidate_loss, candidate_loss_reference):
        for size in (1, 10**9):
            monkeypatch.setattr(fused_softmax, "CPU_CHUNKS", ChunkSize(size, min_outputs=5, multiple=1))
            mine = solved(way(outputs, rows, candidates, score), [outputs, rows])
            torch.testing.assert_close(mine, exact, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("score", KINDS, ids=str)
def test_float32_is_as_near_as_its_rounding(score: Score) -> None:
    """Outputs as a norm leaves them, rows as they are first drawn and longer ones, one of them beside an output."""
    generator = torch.Generator().manual_seed(0)
    outputs = torch.nn.functional.layer_norm(torch.randn(40, 128, generator=generator), (128,)).requires_grad_()
    rows = torch.randn(90, 128, generator=generator) * torch.logspace(-2, 0, 90)[:, None]
    rows[-1] = outputs[0].detach() + 10 * rows[0]
    candidates = Candidates(None, torch.randn(90, generator=generator).double(), torch.arange(40) + 50)
    inputs = [outputs, rows.requires_grad_()]
    score = Harmonic(128**-0.5) if isinstance(score, Harmonic) else score
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    reference = solved(candidate_loss_reference(exact[0], exact[1], candidates, score), exact)
    for mine, value in zip(solved(candidate_loss(outputs, rows, candidates, score), inputs), reference, strict=True):
        assert (mine - value).norm() < 1e-4 * value.norm()


@pytest.mark.parametrize("score", KINDS, ids=str)
def test_a_learned_bias_gets_its_gradient(score: Score) -> None:
    outputs, rows, candidates = drawn(12, 9, 4, torch.float64, CPU, apart=False)
    bias = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    among = Candidates(None, bias, candidates.target_N, target_logit_has_bias=True)
    mine, exact = (
        solved(way(outputs, rows, among, score), [bias, outputs, rows])
        for way in (candidate_loss, candidate_loss_reference)
    )
    torch.testing.assert_close(mine, exact)


@pytest.mark.parametrize("half", [False, True])
def test_a_score_that_is_no_product_takes_torchs_operations_in_float32_on_a_gpu_too(
    monkeypatch: pytest.MonkeyPatch, half: bool
) -> None:
    """Also under autocast, as bf16 is computed at ZeRO 0."""
    monkeypatch.setattr(fused_softmax, "supports_kernel", lambda tensor: tensor.dtype != torch.float64)
    outputs, rows, candidates = drawn(23, 14, 6, torch.float32, CPU, apart=False)
    exact = solved(candidate_loss_reference(outputs, rows, candidates, Harmonic(0.7)), [outputs, rows])
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        mine = solved(candidate_loss(outputs, rows, candidates, Harmonic(0.7)), [outputs, rows])
    torch.testing.assert_close(mine, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("score", KINDS, ids=str)
def test_evaluation_is_that_of_the_definition_whole_and_in_blocks(score: Score) -> None:
    outputs, rows, candidates = drawn(30, 17, 6, torch.float64, CPU, apart=False)
    vocabulary = all_rows_as_candidates(candidates.target_N, candidates.bias_U)
    logs = (definition(score, outputs, rows) + candidates.bias_U).log_softmax(1)
    loss = -logs.gather(1, candidates.target_N[:, None]).sum().item()
    correct = int((logs.argmax(1) == candidates.target_N).sum())
    for sums in (
        Softmax(outputs, rows, vocabulary, score).sums(),
        streamed_sums(outputs, rows.split(5), vocabulary, score),
    ):
        assert sums.loss == pytest.approx(loss, rel=1e-6)
        assert sums.correct == correct


def test_two_points_that_coincide_are_finite() -> None:
    points = torch.ones(3, 4, requires_grad=True)
    loss = candidate_loss(points, points, all_rows_as_candidates(torch.arange(3)), Harmonic(0.1))
    assert loss.isfinite()
    assert torch.autograd.grad(loss, points)[0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_points_nearer_than_the_least_distance_have_no_slope_as_by_the_definition(dtype: torch.dtype) -> None:
    """The first output almost has its own row, the second another's, the third is at its own."""
    outputs = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]], dtype=dtype).requires_grad_()
    rows = torch.tensor([[1.02, 0.0], [0.0, 3.0], [2.0, 2.0], [0.0, 0.99]], dtype=dtype).requires_grad_()
    candidates = all_rows_as_candidates(torch.arange(3))
    mine, exact = (
        solved(way(outputs, rows, candidates, Harmonic(0.5)), [outputs, rows])
        for way in (candidate_loss, candidate_loss_reference)
    )
    torch.testing.assert_close(mine, exact, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["cosine", "harmonic"])
def test_the_training_free_head_of_every_score_is_the_score_and_log_q(kind: str) -> None:
    """Free outputs in three dimensions, trained to the optimum: the score plus log q is log p(v | context)."""
    generator = torch.Generator().manual_seed(0)
    joint = torch.rand(2, 3, generator=generator)
    pairs = torch.multinomial(joint.flatten(), 20_000, replacement=True, generator=generator)
    contexts, targets = pairs // 3, pairs % 3
    outputs = torch.randn(2, 3, generator=generator).requires_grad_()
    rows = torch.eye(3).requires_grad_()
    score = SCORES[kind](0.5)
    optimizer = torch.optim.LBFGS([outputs, rows], max_iter=200, line_search_fn="strong_wolfe")
    candidates = unique_candidates(targets)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = candidate_loss(outputs[contexts], rows, candidates, score) / len(targets)
        loss.backward()
        return loss

    optimizer.step(closure)
    head = (score.reference_scores(outputs, rows) + log_unigram(torch.bincount(targets), 3)).softmax(1)
    empirical = torch.zeros(2, 3).index_put_((contexts, targets), torch.tensor(1.0), accumulate=True)
    torch.testing.assert_close(head, empirical / empirical.sum(1, keepdim=True), atol=5e-3, rtol=2e-2)


def test_a_distance_ignores_the_scale_of_both_sides_and_a_cosine_that_of_either() -> None:
    outputs, rows, candidates = drawn(9, 7, 5, torch.float64, CPU, apart=False)
    harmonic, cosine = Harmonic(0.3), Cosine(0.3)
    losses = {score: candidate_loss(outputs, rows, candidates, score).item() for score in (harmonic, cosine)}
    for score, scale in ((harmonic, 3), (cosine, 7)):
        scaled = candidate_loss(3 * outputs, scale * rows, candidates, score)
        assert scaled.item() == pytest.approx(losses[score])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rows_of_0_as_in_a_padded_table_have_a_cosine_of_0(dtype: torch.dtype) -> None:
    rows = torch.tensor([[0.0, 0.0], [3e-3, 4e-3], [30.0, 40.0]], dtype=dtype)
    expected = torch.tensor([[0.0, 0.0], [0.6, 0.8], [0.6, 0.8]])
    torch.testing.assert_close(Cosine(1.0).transform_rows(rows).float(), expected, rtol=1e-2, atol=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")
def test_the_kernel_takes_a_cosine(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)
    outputs, rows, candidates = drawn(23, 37, 24, torch.float32, CPU)
    mine = solved(candidate_loss(outputs, rows, candidates, Cosine(0.3)), [outputs, rows])
    exact = [tensor.detach().double().requires_grad_() for tensor in (outputs, rows)]
    reference = solved(candidate_loss_reference(exact[0], exact[1], candidates, Cosine(0.3)), exact)
    assert_rounded_once(mine, reference, torch.float32, roundings=20)
    assert_rounded_once(
        solved(candidate_loss(outputs, rows, candidates, Dot(0.3)), [outputs, rows]),
        truth(outputs, rows, candidates, 0.3),
        torch.float32,
        roundings=20,
    )
