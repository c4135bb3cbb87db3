"""The row kernel where candidates are split over ranks, or are a vocabulary, against the reference in float64.

On a GPU ranks take turns on it; in Triton's interpreter, on a CPU, everything is small.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megahead.distributed.group import Group
from megahead.losses.candidates import Candidates
from megahead.losses.scores import Dot
from megahead.losses.softmax import CandidateShard, Softmax, candidate_loss, candidate_loss_reference
from support.in_turn import in_turn
from support.long import long
from support.row_kernel_cases import assert_rounded_once, drawn, on_device, solved, truth

pytest.importorskip("triton", reason="needs triton (the `test` extra, or torch for CUDA)")
TEMPERATURE = 0.7
ON_GPU = pytest.mark.gpu
SMALL = ("cpu", 23, 37, 24)


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    return on_device(request.param, monkeypatch)


def sharded(rows_UD: Tensor, shard: CandidateShard) -> Tensor:
    """This rank's rows; where there is no candidate, nonsense."""
    table = rows_UD.new_full((shard.width, rows_UD.shape[1]), 77.0)
    table[: shard.count] = rows_UD[shard.first : shard.first + shard.count].detach()
    return table.requires_grad_()


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("size", [2, long(4)])
@pytest.mark.parametrize(
    ("device", "n", "u", "d"),
    [SMALL, pytest.param("cuda", 3001, 4599, 512, marks=ON_GPU), pytest.param("cuda", 2048, 30522, 768, marks=ON_GPU)],
    indirect=["device"],
)
def test_split_over_ranks_it_equals_the_reference(
    device: torch.device, n: int, u: int, d: int, size: int, apart: bool
) -> None:
    outputs, rows, candidates = drawn(n, u, d, torch.bfloat16, device, apart)

    def work(group: Group) -> tuple[list[Tensor], tuple[float, ...]]:
        shard = CandidateShard.of(u, -(-u // size), group)
        table = sharded(rows, shard)
        loss = Softmax(outputs, table, candidates, Dot(TEMPERATURE), shard).loss()
        value, of_outputs, of_rows = solved(loss, [outputs, table])
        assert not of_rows[shard.count :].any()
        sums = Softmax(outputs, table, replace(candidates, as_target_bias_U=None), Dot(TEMPERATURE), shard).sums()
        return [value, of_outputs, of_rows[: shard.count]], tuple(sums)

    results = in_turn(size, work)
    parts = [part for part, _ in results]
    of_outputs, of_rows = sum(part[1] for part in parts), torch.cat([part[2] for part in parts])
    exact = truth(outputs, rows, candidates, TEMPERATURE)
    for part in parts:
        assert_rounded_once([part[0], of_outputs, of_rows], exact, torch.bfloat16, roundings=3)  # of each rank's part
    plain = replace(candidates, as_target_bias_U=None)
    sums = Softmax(outputs.double(), rows.double(), plain, Dot(TEMPERATURE)).sums()
    for _, (loss, correct, targets, *_) in results:
        assert loss == pytest.approx(sums.loss, rel=1e-5)
        assert abs(correct - sums.correct) <= n // 1000  # equal but for ties in rounding
        assert targets == sums.targets


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("device", "n", "u", "d"),
    [SMALL, pytest.param("cuda", 3000, 30522, 768, marks=ON_GPU), pytest.param("cuda", 2048, 50277, 512, marks=ON_GPU)],
    indirect=["device"],
)
def test_a_vocabulary_with_a_learned_bias_equals_the_reference(
    device: torch.device, n: int, u: int, d: int, dtype: torch.dtype
) -> None:
    """As an encoder's vanilla head has it: of a size that is a multiple of nothing."""
    outputs, rows, candidates = drawn(n, u, d, dtype, device, apart=False)
    results = []
    for way, kind in ((candidate_loss, dtype), (candidate_loss_reference, torch.float64)):
        bias = candidates.bias_U.to(torch.float32 if kind == dtype else kind).detach().requires_grad_()
        inputs = [outputs.detach().to(kind).requires_grad_(), rows.detach().to(kind).requires_grad_(), bias]
        vocabulary = Candidates(None, bias, candidates.target_N, target_logit_has_bias=True)
        results.append(solved(way(*inputs[:2], vocabulary, Dot(TEMPERATURE)), inputs))
    assert_rounded_once(*results, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("device", "n", "u", "d"),
    [SMALL, pytest.param("cuda", 3000, 50277, 512, marks=ON_GPU)],
    indirect=["device"],
)
@pytest.mark.parametrize("biased", [False, True])
def test_evaluation_over_a_vocabulary_equals_float64(
    device: torch.device, n: int, u: int, d: int, dtype: torch.dtype, biased: bool
) -> None:
    outputs, rows, candidates = drawn(n, u, d, dtype, device, apart=False)
    vocabulary = Candidates(None, candidates.bias_U if biased else None, candidates.target_N)
    mine = Softmax(outputs, rows, vocabulary, Dot(TEMPERATURE)).sums()
    exact = Softmax(outputs.double(), rows.double(), vocabulary, Dot(TEMPERATURE)).sums()
    assert mine.loss == pytest.approx(exact.loss, rel=1e-5)
    assert abs(mine.correct - exact.correct) <= n // 1000
    assert mine.targets == exact.targets


def test_rows_of_a_vocabulary_of_any_size_begin_where_16_bytes_are_moved_at_once(monkeypatch) -> None:
    """Scores, residuals and the bias of an encoder's vanilla head, 30,522 long, of a parameter that is longer."""
    on_device("cpu", monkeypatch)
    seen: list[tuple[int, int, int]] = []

    def look(step: Any, scores_nw: Tensor, *_: Any, **__: Any) -> Tensor:
        assert scores_nw.data_ptr() % 16 == step._score_gradients.data_ptr() % 16 == 0
        seen.append((scores_nw.stride(0), step._score_gradients.stride(0), len(step._biases[0])))
        return torch.empty(4, len(scores_nw))

    monkeypatch.setattr("megahead.losses.triton_kernel.TritonChunkSoftmax._run_kernel", look)
    outputs, rows, bias = (torch.zeros(*shape, requires_grad=True) for shape in ((3, 16), (30592, 16), (30592,)))
    vocabulary = Candidates(None, bias[:30522], torch.zeros(3, dtype=torch.int64), target_logit_has_bias=True)
    torch.autograd.grad(candidate_loss(outputs, rows[:30522], vocabulary), [outputs, rows, bias])
    assert seen == [(30528, 30528, 30528)]


@pytest.mark.gpu
def test_float64_on_a_gpu_takes_no_kernel_and_equals_the_cpu() -> None:
    results = []
    for kind in ("cpu", "cuda"):
        outputs, rows, candidates = drawn(300, 77, 40, torch.float64, torch.device(kind))
        results.append([value.cpu() for value in solved(candidate_loss(outputs, rows, candidates), [outputs, rows])])
    for cpu, cuda in zip(*results, strict=True):
        torch.testing.assert_close(cuda, cpu, rtol=1e-10, atol=1e-10)
