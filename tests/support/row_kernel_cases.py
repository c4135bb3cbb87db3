"""Losses for the row kernel, drawn and solved: by the kernel (on CPUs in Triton's interpreter), and in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megahead.config.objective import ChunkSize
from megahead.losses import fused_softmax
from megahead.losses.candidates import Candidates
from megahead.losses.scores import Dot
from megahead.losses.softmax import candidate_loss_reference


def interpret(patch: pytest.MonkeyPatch) -> None:
    """CPU tensors take the kernel, with blocks and chunks so small that a few dozen rows fill several."""
    from megahead.losses import triton_kernel as row_kernel

    patch.setattr(fused_softmax, "supports_kernel", lambda tensor: tensor.dtype != torch.float64)
    patch.setattr(row_kernel, "BLOCK", 16)
    patch.setattr(row_kernel, "GPU_CHUNKS", ChunkSize(score_bytes=1, min_outputs=8, multiple=1))


def on_device(kind: str, patch: pytest.MonkeyPatch) -> torch.device:
    """For a fixture: `cpu` interprets, where there is no GPU."""
    if kind == "cpu":
        if torch.cuda.is_available():
            pytest.skip("Triton's interpreter is for machines without a GPU")
        interpret(patch)
    return torch.device(kind)


def drawn(
    n: int, u: int, d: int, dtype: torch.dtype, device: torch.device, apart: bool = True
) -> tuple[Tensor, Tensor, Candidates]:
    """Outputs, rows, candidates; `apart`: the last has the bias -inf for all but the outputs whose positive it is."""
    generator = torch.Generator().manual_seed(n + u + d)
    outputs = torch.randn(n, d, generator=generator).to(device, dtype).requires_grad_()
    rows = (torch.randn(u, d, generator=generator) * min(1, 5 / d**0.5)).to(device, dtype).requires_grad_()
    own = torch.randint(u, (n,), generator=generator).to(device)
    own[0] = u - 1
    bias = torch.randn(u, generator=generator, dtype=torch.float64).to(device)
    if not apart:
        return outputs, rows, Candidates(None, bias, own)
    target_bias = bias.clone()
    bias[-1] = -torch.inf
    return outputs, rows, Candidates(None, bias, own, target_bias)


def solved(loss: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return [loss.detach().double(), *(gradient.double() for gradient in torch.autograd.grad(3 * loss, inputs))]


def truth(outputs: Tensor, rows: Tensor, candidates: Candidates, temperature: float) -> list[Tensor]:
    exact = [tensor.detach().double().requires_grad_() for tensor in (outputs, rows)]
    return solved(candidate_loss_reference(*exact, candidates, Dot(temperature)), exact)


def assert_rounded_once(mine: list[Tensor], exact: list[Tensor], dtype: torch.dtype, roundings: float = 2) -> None:
    """The loss as in float32, in bf16 with its scores rounded; gradients within a few roundings of `dtype`."""
    torch.testing.assert_close(mine[0], exact[0], rtol=2**-8 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    for value, true in zip(mine[1:], exact[1:], strict=True):
        assert (value - true).norm() < roundings * torch.finfo(dtype).eps * true.norm()
