"""The loss with bf16 products on CPUs, against the reference in float64; and where products stay in float32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megahead.config.objective import ChunkSize
from megahead.distributed.group import Group
from megahead.losses import fused_softmax
from megahead.losses.candidates import Candidates
from megahead.losses.fused_softmax import loss_dtype
from megahead.losses.scores import Dot, Harmonic, Score
from megahead.losses.softmax import CandidateShard, Softmax, candidate_loss, candidate_loss_reference
from support.on_ranks import on_ranks
from support.row_kernel_cases import drawn, solved

CPU = torch.device("cpu")
HALF, FULL = torch.bfloat16, torch.float32
EPSILON = torch.finfo(HALF).eps
SCORE = Dot(0.7)


@pytest.fixture(autouse=True)
def with_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU with units for bf16, in chunks of a few outputs; others multiply it slowly, to the same results."""
    monkeypatch.setattr(fused_softmax, "has_fast_bf16", lambda _: True)
    monkeypatch.setattr(fused_softmax, "CPU_CHUNKS", ChunkSize(score_bytes=1, min_outputs=8, multiple=1))


def exact(outputs: Tensor, rows: Tensor, candidates: Candidates, *others: Tensor) -> list[Tensor]:
    """In float64, with the gradients of `others`, too."""
    copies = [tensor.detach().double().requires_grad_() for tensor in (outputs, rows, *others)]
    candidates = replace(candidates, bias_U=copies[2]) if others else candidates
    return solved(candidate_loss_reference(*copies[:2], candidates, SCORE), copies)


def assert_rounded(mine: list[Tensor], true: list[Tensor]) -> None:
    """Loss and gradients as close as scores that are rounded to bf16 let them be."""
    torch.testing.assert_close(mine[0], true[0], rtol=EPSILON / 4, atol=0)
    for value, wanted in zip(mine[1:], true[1:], strict=True):
        assert (value - wanted).norm() < 2 * EPSILON * wanted.norm()


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_products_in_bf16_lose_no_more_than_their_rounding(apart: bool, weighted: bool) -> None:
    outputs, rows, candidates = drawn(41, 35, 24, HALF, CPU, apart)
    if weighted:
        candidates = replace(candidates, weight_N=50 / torch.randint(1, 51, (41,)))
    loss = candidate_loss(outputs, rows, candidates, SCORE)
    assert loss.dtype == FULL
    mine = solved(loss, [outputs, rows])
    assert_rounded(mine, exact(outputs, rows, candidates))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_softmax, "has_fast_bf16", lambda _: False)
        full = solved(candidate_loss(outputs, rows, candidates, SCORE), [outputs, rows])
    assert [value.equal(other) for value, other in zip(mine, full, strict=True)] == [False] * 3


def test_a_learned_bias_gets_its_gradient() -> None:
    outputs, rows, candidates = drawn(41, 35, 24, HALF, CPU, apart=False)
    assert candidates.bias_U is not None
    bias = candidates.bias_U.to(HALF).requires_grad_()
    candidates = replace(candidates, bias_U=bias, target_logit_has_bias=True)
    mine = solved(candidate_loss(outputs, rows, candidates, SCORE), [outputs, rows, bias])
    assert_rounded(mine, exact(outputs, rows, candidates, bias))


def test_gradients_over_many_chunks_add_up_in_float32() -> None:
    """Each of 2,000 chunks gives a row the same gradient; in bf16 the sum would stand still long before."""
    outputs = torch.tensor([[1.0, 0.5]]).repeat(16_000, 1).to(HALF)
    rows = torch.tensor([[0.5, 1.0], [1.0, -0.5]]).to(HALF).requires_grad_()
    candidates = Candidates(None, None, torch.zeros(16_000, dtype=torch.int64))
    (gradient,) = torch.autograd.grad(candidate_loss(outputs, rows, candidates), rows)
    copy = rows.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(candidate_loss_reference(outputs.double(), copy, candidates), copy)
    assert (gradient.double() - wanted).norm() < EPSILON * wanted.norm()


def split(group: Group, fast: tuple[bool, ...]) -> list[Tensor]:
    """The loss and its gradients with candidates split over ranks, of which some have units for bf16."""
    fused_softmax.has_fast_bf16 = lambda _: fast[group.rank]  # in a process of its own
    outputs, rows, candidates = drawn(23, 38, 24, HALF, CPU, apart=False)
    shard = CandidateShard.of(38, -(-38 // group.size), group)
    table = rows.new_full((shard.width, 24), 77.0)  # where there is no candidate, nonsense
    table[: shard.count] = rows[shard.first : shard.first + shard.count].detach()
    loss, of_outputs, of_rows = solved(
        Softmax(outputs, table.requires_grad_(), candidates, SCORE, shard).loss(), [outputs, table]
    )
    return [loss, of_outputs, of_rows[: shard.count]]


@pytest.mark.parametrize("fast", [(True,), (True, True), (True,) * 4, (True, False)])
def test_over_ranks_it_is_the_same_also_where_not_all_have_units(fast: tuple[bool, ...]) -> None:
    results: list[list[Tensor]] = on_ranks(len(fast), split, fast)
    true = exact(*drawn(23, 38, 24, HALF, CPU, apart=False))
    of_rows = torch.cat([part for *_, part in results])
    for loss, of_outputs, _ in results:
        assert_rounded([loss, of_outputs, of_rows], true)
        assert loss.equal(results[0][0])
        assert of_outputs.equal(results[0][1])


@pytest.mark.parametrize(
    ("outputs", "rows", "score", "wanted"),
    [
        (HALF, HALF, Dot(), HALF),
        (HALF, FULL, Dot(), FULL),
        (FULL, FULL, Dot(), FULL),
        (torch.float16, torch.float16, Dot(), FULL),
        (torch.float64, HALF, Dot(), torch.float64),
        (HALF, HALF, Harmonic(), FULL),
    ],
)
def test_only_bf16_alone_and_scores_that_are_products_take_bf16_products(
    outputs: torch.dtype, rows: torch.dtype, score: Score, wanted: torch.dtype
) -> None:
    given: Any = (torch.ones(3, 2, dtype=outputs), torch.ones(4, 2, dtype=rows), score)
    assert loss_dtype(*given) == wanted


def test_under_autocast_to_bf16_so_do_others() -> None:
    outputs, rows, candidates = drawn(41, 35, 24, FULL, CPU, apart=False)
    with torch.autocast("cpu", HALF):
        assert loss_dtype(outputs.double(), rows, SCORE) == torch.float64
        mine = solved(candidate_loss(outputs, rows, candidates, SCORE), [outputs, rows])
    assert_rounded(mine, exact(outputs.to(HALF), rows.to(HALF), candidates))
    outputs, rows = (tensor.detach().to(HALF).requires_grad_() for tensor in (outputs, rows))
    same = solved(candidate_loss(outputs, rows, candidates, SCORE), [outputs, rows])
    assert all(value.to(HALF).equal(other.to(HALF)) for value, other in zip(mine, same, strict=True))


def test_evaluation_takes_no_bf16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded scores would often be the same, so that a target is less often the only largest."""
    outputs, rows, candidates = drawn(41, 35, 24, HALF, CPU, apart=False)
    monkeypatch.setattr(fused_softmax, "Bf16ChunkSoftmax", None)
    mine = Softmax(outputs, rows, candidates, SCORE).sums()
    true = Softmax(outputs.double(), rows.double(), candidates, SCORE).sums()
    assert mine.loss == pytest.approx(true.loss, rel=1e-5)
    assert mine.correct == true.correct > 0
