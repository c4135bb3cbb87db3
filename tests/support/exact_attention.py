"""Attention as the formula says, in float64, and tensors to try it on."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megahead.models.attention_backends import AttentionFunction
from megahead.models.documents import Documents

POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2], [0, 0, 0, 1, 2, 3, 4]])
"""Of two rows; the second begins with documents of one token."""


def seen(positions_BT: Tensor, causal: bool, window: int | None = None) -> Tensor:
    """[B, T, T] bool: which tokens each token reads, at most `window` away."""
    document_BT = (positions_BT == 0).cumsum(1)
    same_BTT = document_BT[:, :, None] == document_BT[:, None, :]
    if window is not None:
        same_BTT = same_BTT.triu(-window).tril(window)
    return same_BTT.tril() if causal else same_BTT


def formula(q_BTHd: Tensor, k_BTHd: Tensor, v_BTHd: Tensor, causal_mask_BTT: Tensor) -> Tensor:
    scores_BHTT = torch.einsum("bqhd,bkhd->bhqk", q_BTHd, k_BTHd) / math.sqrt(q_BTHd.shape[-1])
    weights_BHTT = scores_BHTT.masked_fill(~causal_mask_BTT[:, None], -math.inf).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights_BHTT, v_BTHd)


def random_qkv(
    device: str = "cpu", dtype: torch.dtype = torch.float64, shape: tuple[int, ...] = (2, 7, 3, 8)
) -> Tensor:
    """[3, B, T, H, d], the same numbers on every device, that want a gradient."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, *shape, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()


def value_and_gradient(output: Tensor, qkv: Tensor) -> tuple[Tensor, Tensor]:
    weights = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).bfloat16()  # the same in every precision
    weights = weights.to(output.device, output.dtype).view_as(output)
    (gradient,) = torch.autograd.grad((output * weights).sum(), qkv)
    return output.detach(), gradient


def relative_errors(
    attend: AttentionFunction, qkv: Tensor, positions: Tensor | None, causal: bool, window: int | None = None
) -> list[float]:
    """|| found - exact || / || exact || of value and gradient; exact is the formula in float64 on the same qkv.

    Without `positions` each row is one document. `window`: of local attention.
    """
    exact_qkv = qkv.detach().double().cpu().requires_grad_()
    rows, length = qkv.shape[1:3]
    whole = torch.arange(length).expand(rows, length)
    mask_BTT = seen(whole if positions is None else positions, causal, window)
    exact = value_and_gradient(formula(*exact_qkv, mask_BTT), exact_qkv)
    whole_rows = Documents.whole_rows(rows, length, qkv.device)
    documents = whole_rows if positions is None else Documents(positions.to(qkv.device))
    documents = documents if window is None else documents.with_window(window)
    found = value_and_gradient(attend(*qkv, documents, causal=causal), qkv)
    return [float((f.double().cpu() - e).norm() / e.norm()) for f, e in zip(found, exact, strict=True)]
