"""The Triton kernels against the reference in float64: on CUDA where there is one, else in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megahead.objectives import Candidates, candidate_loss, candidate_loss_reference, candidate_softmax

pytest.importorskip("triton", reason="needs triton (the `test` extra, or torch for CUDA)")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch):
    """The module with blocks so small that a few dozen rows fill several."""
    from megahead.objectives import fused

    if DEVICE.type == "cpu":
        monkeypatch.setattr(fused, "BLOCKS", {"BLOCK_N": 16, "BLOCK_U": 16, "BLOCK_K": 16})
        monkeypatch.setattr(fused, "BLOCK_D", 16)
    return fused


def drawn(n: int, u: int, d: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Candidates]:
    """Outputs, rows, and candidates of which the last has the bias -inf for all but own tokens."""
    generator = torch.Generator().manual_seed(n + u + d)
    outputs = torch.randn(n, d, generator=generator).to(DEVICE, dtype).requires_grad_()
    rows = torch.randn(u, d, generator=generator).to(DEVICE, dtype).requires_grad_()
    own = torch.randint(u, (n,), generator=generator).to(DEVICE)
    bias = torch.randn(u, generator=generator, dtype=torch.float64).to(DEVICE)
    positive_bias = bias.clone()
    bias[-1] = -torch.inf
    return outputs, rows, Candidates(None, bias, own, positive_bias)


def truth(outputs: Tensor, rows: Tensor, candidates: Candidates, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    exact = [tensor.detach().double().requires_grad_() for tensor in (outputs, rows)]
    loss = candidate_loss_reference(*exact, candidates, temperature)
    return loss, *torch.autograd.grad(3 * loss, exact)


@pytest.mark.parametrize(("n", "u", "d"), [(1, 2, 1), (16, 16, 16), (19, 37, 23), (33, 18, 40)])
@pytest.mark.parametrize("own_apart", [False, True])
def test_float32_equals_the_reference(fused, n: int, u: int, d: int, own_apart: bool) -> None:
    outputs, rows, candidates = drawn(n, u, d, torch.float32)
    if not own_apart:
        candidates = replace(candidates, bias_U=candidates.positive_bias_U, positive_bias_U=None)
    loss = fused.fused_candidate_loss(outputs, rows, candidates, 0.7)
    gradients = torch.autograd.grad(3 * loss, [outputs, rows])
    for mine, exact in zip((loss, *gradients), truth(outputs, rows, candidates, 0.7), strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("learned", [True, False])
def test_the_loss_is_the_same_where_the_kernels_serve(fused, monkeypatch: pytest.MonkeyPatch, learned: bool) -> None:
    monkeypatch.setattr(candidate_softmax, "_half_type", lambda *_: torch.float32)
    outputs, rows, candidates = drawn(5, 18, 7, torch.float32)
    candidates.positive_N[0] = 17  # the one that is a candidate for nobody else
    wanted = [outputs, rows]
    if learned:
        assert candidates.positive_bias_U is not None
        wanted.append(candidates.positive_bias_U.requires_grad_())
        candidates = replace(candidates, bias_U=candidates.positive_bias_U, positive_bias_U=None)
    results = []
    for loss in (candidate_loss, candidate_loss_reference):
        value = loss(outputs, rows, candidates, 0.7)
        results.append([value, *torch.autograd.grad(3 * value, wanted)])
    for mine, reference in zip(*results, strict=True):
        torch.testing.assert_close(mine, reference, rtol=2e-5, atol=2e-5, check_dtype=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_probabilities_and_results_and_nothing_else(fused, dtype: torch.dtype) -> None:
    outputs, rows, candidates = drawn(21, 35, 24, dtype)
    loss = fused.fused_candidate_loss(outputs, rows, candidates)
    gradients = torch.autograd.grad(3 * loss, [outputs, rows])
    exact_loss, *exact_gradients = truth(outputs, rows, candidates, 1.0)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), exact_loss, rtol=1e-5, atol=1e-5)
    for mine, exact in zip(gradients, exact_gradients, strict=True):
        assert mine.dtype == dtype
        assert (mine.double() - exact).norm() < 4 * torch.finfo(dtype).eps * exact.norm()


def test_extreme_scores_stay_finite(fused) -> None:
    outputs = torch.tensor([[100.0, 0.0], [-100.0, 0.0], [0.0, 0.0]], device=DEVICE).bfloat16().requires_grad_()
    rows = torch.tensor([[100.0, 0.0], [-100.0, 0.0]], device=DEVICE).bfloat16().requires_grad_()
    loss = fused.fused_candidate_loss(outputs, rows, Candidates(None, None, torch.tensor([1, 0, 0], device=DEVICE)))
    assert loss.item() == pytest.approx(4e4, rel=1e-2)
    for gradient in torch.autograd.grad(loss, [outputs, rows]):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_learned_bias_gets_its_gradient(fused, temperature: float) -> None:
    outputs, rows, candidates = drawn(19, 23, 16, torch.float32)
    results = []
    for way, dtype in ((fused.fused_candidate_loss, torch.float32), (candidate_loss_reference, torch.float64)):
        inputs = [x.detach().to(dtype).requires_grad_() for x in (outputs, rows, candidates.positive_bias_U)]
        learned = replace(candidates, bias_U=inputs[2], positive_bias_U=None)
        loss = way(*inputs[:2], learned, temperature)
        results.append([loss.double(), *(gradient.double() for gradient in torch.autograd.grad(loss, inputs))])
    for mine, exact in zip(*results, strict=True):
        torch.testing.assert_close(mine, exact, rtol=2e-5, atol=2e-5)


@pytest.mark.gpu
def test_cuda_takes_the_kernels_for_half_precision_and_under_autocast() -> None:
    outputs, rows, candidates = drawn(300, 700, 512, torch.bfloat16)
    candidates = replace(candidates, bias_U=candidates.positive_bias_U, positive_bias_U=None)
    loss = candidate_loss(outputs, rows, candidates)
    assert "Fused" in type(loss.grad_fn.next_functions[0][0]).__name__
    with torch.autocast("cuda", torch.bfloat16):
        cast = candidate_loss(outputs.float(), rows.float(), candidates)
    torch.testing.assert_close(cast, loss)
