"""The loss by the Triton kernel against the reference in float64: on CUDA, and in Triton's interpreter elsewhere."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megahead.config.objective import ChunkSize
from megahead.distributed.group import Group
from megahead.losses.candidates import Candidates
from megahead.losses.fused_softmax import TorchChunkSoftmax, build_chunk_softmax
from megahead.losses.scores import Dot
from megahead.losses.softmax import CandidateShard, Softmax, candidate_loss, candidate_loss_reference
from support.cuda_rules import CudaRounding
from support.long import long
from support.on_ranks import on_ranks
from support.row_kernel_cases import assert_rounded_once, drawn, interpret, on_device, solved, truth

pytest.importorskip("triton", reason="needs triton (the `test` extra, or torch for CUDA)")
TEMPERATURE = 0.7


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    return on_device(request.param, monkeypatch)


@pytest.mark.parametrize(("n", "u", "d"), [(1, 2, 1), (16, 16, 16), (19, 37, 23), (33, 18, 40)])
@pytest.mark.parametrize("apart", [False, True])
def test_float32_equals_the_reference(device: torch.device, n: int, u: int, d: int, apart: bool) -> None:
    outputs, rows, candidates = drawn(n, u, d, torch.float32, device, apart)
    mine = solved(candidate_loss(outputs, rows, candidates, Dot(TEMPERATURE)), [outputs, rows])
    for value, exact in zip(mine, truth(outputs, rows, candidates, TEMPERATURE), strict=True):
        torch.testing.assert_close(value, exact, rtol=2e-5, atol=2e-5)


def test_without_biases_it_equals_the_reference(device: torch.device) -> None:
    outputs, rows, candidates = drawn(19, 37, 23, torch.float32, device)
    candidates = Candidates(None, None, candidates.target_N)
    mine = solved(candidate_loss(outputs, rows, candidates), [outputs, rows])
    for value, exact in zip(mine, truth(outputs, rows, candidates, 1.0), strict=True):
        torch.testing.assert_close(value, exact, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("apart", [False, True])
def test_half_precision_rounds_bf16_scores_residuals_and_results_alone(
    device: torch.device, dtype: torch.dtype, apart: bool
) -> None:
    outputs, rows, candidates = drawn(21, 35, 24, dtype, device, apart)
    loss = candidate_loss(outputs, rows, candidates)
    assert loss.dtype == torch.float32
    assert [gradient.dtype for gradient in torch.autograd.grad(loss, [outputs, rows], retain_graph=True)] == [dtype] * 2
    assert_rounded_once(solved(loss, [outputs, rows]), truth(outputs, rows, candidates, 1.0), dtype)


@pytest.mark.parametrize(("n", "u", "d"), [(1, 2, 1), (21, 35, 24), long(33, 130, 40), (8, 17, 64)])
@pytest.mark.parametrize("apart", [False, True])
def test_a_rounded_score_changes_a_loss_by_2_to_the_minus_7_of_the_largest(
    device: torch.device, n: int, u: int, d: int, apart: bool
) -> None:
    """The bounds of the docstring, for every output and every probability."""
    outputs, rows, candidates = (
        x if isinstance(x, Candidates) else x.detach() for x in drawn(n, u, d, torch.bfloat16, device, apart)
    )
    score = Dot(TEMPERATURE)
    exact = TorchChunkSoftmax(outputs.double(), rows.double(), candidates, score, Group())
    softmax = build_chunk_softmax(outputs, rows, candidates, score, Group())
    for part in (slice(first, first + softmax.chunk_size) for first in range(0, n, softmax.chunk_size)):
        truth, mine = (
            each.score_gradients(outputs[part].to(dtype), candidates.target_N[part])
            for each, dtype in ((exact, torch.float64), (softmax, torch.bfloat16))
        )
        largest_n = (outputs[part].double() @ rows.double().T).abs().amax(1) * score.scale
        assert ((mine.loss_n - truth.loss_n).abs() <= 2**-7 * largest_n + 1e-5).all()
        probability_nU = truth.matrix_nw * truth.weight_n1
        is_own_nU = torch.arange(u, device=device) == candidates.target_N[part, None]
        bound_nU = (probability_nU + is_own_nU) * (2**-7 * largest_n[:, None]).expm1() + 2**-8
        assert ((mine.matrix_nw - probability_nU).abs() <= bound_nU).all()
    assert u == 2 or mine.matrix_nw.data_ptr() == softmax._scores.data_ptr()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("n", "u", "d"), [(4096, 1536, 512), (16384, 4608, 512), (3001, 4599, 1024), (1500, 50257, 768)]
)
def test_half_precision_at_sizes_of_training(n: int, u: int, d: int, dtype: torch.dtype) -> None:
    outputs, rows, candidates = drawn(n, u, d, dtype, torch.device("cuda"))
    assert_rounded_once(
        solved(candidate_loss(outputs, rows, candidates), [outputs, rows]), truth(outputs, rows, candidates, 1.0), dtype
    )


def test_extreme_scores_stay_finite(device: torch.device) -> None:
    outputs = torch.tensor([[100.0, 0.0], [-100.0, 0.0], [0.0, 0.0]], device=device).bfloat16().requires_grad_()
    rows = torch.tensor([[100.0, 0.0], [-100.0, 0.0]], device=device).bfloat16().requires_grad_()
    loss = candidate_loss(outputs, rows, Candidates(None, None, torch.tensor([1, 0, 0], device=device)))
    assert loss.item() == pytest.approx(4e4, rel=1e-2)
    for gradient in torch.autograd.grad(loss, [outputs, rows]):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_learned_bias_gets_its_gradient(device: torch.device, temperature: float) -> None:
    outputs, rows, candidates = drawn(19, 23, 16, torch.float32, device, apart=False)
    results = []
    for way, dtype in ((candidate_loss, torch.float32), (candidate_loss_reference, torch.float64)):
        inputs = [x.detach().to(dtype).requires_grad_() for x in (outputs, rows, candidates.bias_U)]
        among = replace(candidates, bias_U=inputs[2], target_logit_has_bias=True)
        results.append(solved(way(*inputs[:2], among, Dot(temperature)), inputs))
    for mine, exact in zip(*results, strict=True):
        torch.testing.assert_close(mine, exact, rtol=2e-5, atol=2e-5)


def test_evaluation_sums_equal_those_in_float64(device: torch.device) -> None:
    outputs, rows, candidates = drawn(40, 37, 23, torch.bfloat16, device, apart=False)
    mine = Softmax(outputs, rows, candidates, Dot(0.5)).sums()
    exact = Softmax(outputs.double(), rows.double(), candidates, Dot(0.5)).sums()
    assert exact.correct > 0
    assert mine.loss == pytest.approx(exact.loss, rel=1e-5)
    assert (mine.correct, mine.targets) == (exact.correct, exact.targets)


def split(group: Group, count: int, apart: bool) -> tuple[Tensor, Tensor, Tensor, tuple[float, ...]]:
    with pytest.MonkeyPatch.context() as patch:
        interpret(patch)
        outputs, rows, candidates = drawn(23, count, 24, torch.bfloat16, torch.device("cpu"), apart)
        shard = CandidateShard.of(count, -(-count // group.size), group)
        table = rows.new_full((shard.width, 24), 77.0)  # where there is no candidate, nonsense
        table[: shard.count] = rows[shard.first : shard.first + shard.count].detach()
        table.requires_grad_()
        loss = Softmax(outputs, table, candidates, Dot(TEMPERATURE), shard).loss()
        value, of_outputs, of_rows = solved(loss, [outputs, table])
        assert not of_rows[shard.count :].any()
        sums = Softmax(outputs, table, replace(candidates, as_target_bias_U=None), Dot(TEMPERATURE), shard).sums()
        return value, of_outputs, of_rows[: shard.count], tuple(sums)


@pytest.mark.parametrize(("size", "count", "apart"), [(1, 7, False), (2, 21, True), (4, 37, False), (4, 2, True)])
def test_split_over_ranks_it_equals_the_reference(size: int, count: int, apart: bool) -> None:
    if torch.cuda.is_available():
        pytest.skip("Triton's interpreter is for machines without a GPU")
    outputs, rows, candidates = drawn(23, count, 24, torch.bfloat16, torch.device("cpu"), apart)
    exact = truth(outputs, rows, candidates, TEMPERATURE)
    plain = replace(candidates, as_target_bias_U=None)
    sums = Softmax(outputs.double(), rows.double(), plain, Dot(TEMPERATURE)).sums()
    results = on_ranks(size, split, count, apart)
    of_rows = torch.cat([result[2] for result in results])
    for value, of_outputs, _, (loss, correct, targets, *_) in results:
        assert_rounded_once([value, of_outputs, of_rows], exact, torch.bfloat16)
        assert loss == pytest.approx(sums.loss, rel=1e-5)
        assert (correct, targets) == (sums.correct, sums.targets)


@pytest.mark.gpu
def test_cuda_takes_the_kernel_for_half_precision_and_under_autocast() -> None:
    outputs, rows, candidates = drawn(300, 700, 512, torch.bfloat16, torch.device("cuda"))
    loss = candidate_loss(outputs, rows, candidates)
    with torch.autocast("cuda", torch.bfloat16):
        cast = candidate_loss(outputs.float(), rows.float(), candidates)
    assert torch.equal(cast, loss)


def weighed_with_a_learned_bias(candidates: Candidates) -> Candidates:
    """As an encoder's vanilla head has them under masked diffusion."""
    assert candidates.bias_U is not None
    weight_N = 1 + torch.arange(len(candidates.target_N), device=candidates.bias_U.device) % 7 / 3
    bias_U = candidates.bias_U.float().requires_grad_()
    return replace(candidates, bias_U=bias_U, target_logit_has_bias=True, weight_N=weight_N)


@pytest.mark.gpu
@pytest.mark.parametrize("learned", [False, True])
def test_results_do_not_vary_and_nothing_waits_for_the_device(learned: bool) -> None:
    outputs, rows, candidates = drawn(5000, 2048, 512, torch.bfloat16, torch.device("cuda"), apart=not learned)
    candidates = weighed_with_a_learned_bias(candidates) if learned else candidates
    inputs = [outputs, rows, *([candidates.bias_U] if learned else [])]
    first = solved(candidate_loss(outputs, rows, candidates), inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = solved(candidate_loss(outputs, rows, candidates), inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(map(torch.equal, first, again))


class Operations(TorchDispatchMode):
    """How often each operation ran, those that compute nothing left out."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and "empty" not in func.name() and func is not torch.ops.aten.promote_types.default:
            self.counts[func.name().removeprefix("aten::").partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def test_a_chunk_takes_three_products_and_a_difference_beside_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)
    outputs, rows, candidates = drawn(40, 48, 16, torch.float32, torch.device("cpu"))
    counts = []
    for chunk in (8, 40):
        monkeypatch.setattr("megahead.losses.triton_kernel.GPU_CHUNKS", ChunkSize(1, min_outputs=chunk, multiple=1))
        monkeypatch.setattr("megahead.losses.triton_kernel.TritonChunkSoftmax._run_kernel", sums_of_nothing)
        with Operations() as operations:
            torch.autograd.grad(candidate_loss(outputs, rows, candidates), [outputs, rows])
        counts.append(operations.counts)
    five, one = counts
    assert five - one == Counter({"mm": 4 * 2, "addmm_": 4, "sub": 4, "cat": 1})  # of the chunks' losses
    assert (one - Counter({"mm": 2, "addmm_": 1, "sub": 1})).total() <= 10, one


def test_nothing_is_added_up_by_ids_whose_order_a_gpu_would_not_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)
    monkeypatch.setattr("megahead.losses.triton_kernel.TritonChunkSoftmax._run_kernel", sums_of_nothing)
    outputs, rows, candidates = drawn(40, 48, 16, torch.bfloat16, torch.device("cpu"), apart=False)
    candidates = weighed_with_a_learned_bias(candidates)
    with Operations() as operations:
        torch.autograd.grad(candidate_loss(outputs, rows, candidates), [outputs, rows, candidates.bias_U])
    assert not {name for name in operations.counts if "index" in name or "scatter" in name}, operations.counts


@pytest.mark.parametrize("of_outputs", [False, True])
def test_a_losss_factor_is_not_rounded_to_the_dtype_of_gradients(
    of_outputs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that bf16 rounds to 1.5, and with it all gradients of a body by the same 0.26 %; also as outputs' weights."""
    interpret(monkeypatch)
    outputs, rows, candidates = drawn(33, 40, 24, torch.bfloat16, torch.device("cpu"))
    factor = 1.5 + 2**-8
    weighted = replace(candidates, weight_N=torch.full((33,), factor)) if of_outputs else candidates
    with CudaRounding():
        plain = torch.autograd.grad(candidate_loss(outputs, rows, candidates), [outputs, rows])
        loss = candidate_loss(outputs, rows, weighted) * (1 if of_outputs else factor)
        scaled = torch.autograd.grad(loss, [outputs, rows])
    for mine, other in zip(scaled, plain, strict=True):
        ratio = (mine.double() * other.double()).sum() / other.double().square().sum()
        assert float(ratio) == pytest.approx(factor, abs=5e-4)


def test_the_kernel_is_launched_on_the_device_of_its_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which need not be the current one, where Triton launches."""
    interpret(monkeypatch)
    devices: list[Tensor] = []
    launches: list[bool] = []

    @contextmanager
    def device_of(tensor: Tensor) -> Iterator[None]:
        devices.append(tensor)
        yield
        devices.pop()

    def launch(scores: Tensor, *_: Any, **__: Any) -> None:
        launches.append(any(tensor is scores for tensor in devices[-1:]))

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr("megahead.losses.triton_kernel._softmax_kernel", defaultdict(lambda: launch))
    outputs, rows, candidates = drawn(16, 8, 16, torch.float32, torch.device("cpu"))
    candidate_loss(outputs, rows, candidates)
    assert launches == [True, True]


def test_a_bias_with_a_gradient_must_be_in_the_numerator(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs, rows, candidates = drawn(4, 8, 16, torch.float32, torch.device("cpu"), apart=False)
    learned = replace(weighed_with_a_learned_bias(candidates), target_logit_has_bias=False)
    with pytest.raises(ValueError, match="numerator"):
        candidate_loss(outputs, rows, learned)


def sums_of_nothing(step: Any, scores_nw: Tensor, *_: Any, **__: Any) -> Tensor:
    """In the kernel's place, which the interpreter would compute by torch's operations."""
    return torch.empty(4, len(scores_nw))
