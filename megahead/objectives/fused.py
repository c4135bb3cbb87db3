"""The softmax over candidates as Triton kernels: scores live in registers only, block by block, and are made twice.

Forward: logsumexp and positive score of each output. Backward: one kernel for the outputs' gradient, one for the rows';
each program alone writes its block, so that nothing is added atomically and results do not vary. Products read
half-precision (or float32) blocks and add up in float32.

Shapes: N outputs, U candidates, D features; n, u, d the indices of one program's block. With `TRITON_INTERPRET=1` in
the environment before this module is imported, the kernels run on the CPU, for tests.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from megahead.objectives.candidates import Candidates

BLOCKS = {"BLOCK_N": 64, "BLOCK_U": 64, "BLOCK_K": 64}
"""Outputs and candidates of a block of scores, and features multiplied at once."""

BLOCK_D = 256
"""Features of a gradient that one program accumulates; for more, scores are made once for each such part."""

WARPS = 8

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""The interpreter multiplies bfloat16 as if its bits were whole numbers, so it gets the same values as float32."""


def fused_candidate_loss(
    outputs_ND: Tensor, rows_UD: Tensor, candidates: Candidates, temperature: float = 1.0
) -> Tensor:
    """`candidate_loss` for N > 0, without its constant, on half-precision inputs of one type (or float32).

    Extra memory: the gradients and a few numbers for each output and candidate. Gradients round probabilities to the
    type of the inputs. Cost: 3 + 2 ceil(D / BLOCK_D) products of N x U x D.
    """
    positive_N, bias_U, positive_bias_U = candidates.positive_N, candidates.bias_U, candidates.positive_bias_U
    if bias_U is not None and bias_U.requires_grad:
        outputs_ND, rows_UD = _bias_as_feature(outputs_ND, rows_UD, bias_U * temperature)
        biased = fused_candidate_loss(outputs_ND, rows_UD, replace(candidates, bias_U=None), temperature)
        return biased + bias_U.index_select(0, positive_N).sum(dtype=biased.dtype)  # which positive scores now contain
    bias = rows_UD.new_zeros(len(rows_UD), dtype=torch.float32) if bias_U is None else bias_U.float()
    positive_bias_N = (bias if positive_bias_U is None else positive_bias_U.float())[positive_N]
    loss: Tensor = _FusedLoss.apply(outputs_ND, rows_UD, positive_N, bias, positive_bias_N, 1 / temperature)
    return loss


def _bias_as_feature(outputs_ND: Tensor, rows_UD: Tensor, bias_U: Tensor) -> tuple[Tensor, Tensor]:
    """The same scores with the bias as one more feature, 1 in every output: the kernels have no gradient of a bias.

    Eight more features, of which seven are 0, keep rows aligned.
    """
    ones = F.pad(outputs_ND.new_ones(len(outputs_ND), 1), (0, 7))
    column = F.pad(bias_U[:, None].to(rows_UD.dtype), (0, 7))
    return torch.cat([outputs_ND, ones], 1), torch.cat([rows_UD, column], 1)


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        outputs_ND: Tensor,
        rows_UD: Tensor,
        positive_N: Tensor,
        bias_U: Tensor,
        positive_bias_N: Tensor,
        scale: float,
    ) -> Tensor:
        outputs_ND, rows_UD = outputs_ND.contiguous(), rows_UD.contiguous()
        (count, width), candidates = outputs_ND.shape, len(rows_UD)
        lse_N, positive_score_N = bias_U.new_empty(count), bias_U.new_empty(count)
        inputs = (outputs_ND, rows_UD, positive_N, bias_U, positive_bias_N)
        grid = (triton.cdiv(count, BLOCKS["BLOCK_N"]),)
        _forward[grid](*inputs, lse_N, positive_score_N, scale, count, candidates, width, **BLOCKS, num_warps=WARPS)
        ctx.save_for_backward(*inputs, lse_N)
        ctx.scale = scale
        return (lse_N - positive_score_N).sum()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        outputs_ND, rows_UD, *rest = ctx.saved_tensors
        (count, width), candidates = outputs_ND.shape, len(rows_UD)
        grad_outputs, grad_rows = torch.empty_like(outputs_ND), torch.empty_like(rows_UD)
        slope = (grad_loss * ctx.scale).float()
        for kernel, gradient, block in ((_to_outputs, grad_outputs, "BLOCK_N"), (_to_rows, grad_rows, "BLOCK_U")):
            grid = (triton.cdiv(len(gradient), BLOCKS[block]), triton.cdiv(width, BLOCK_D))
            arguments = (outputs_ND, rows_UD, *rest, slope, gradient, ctx.scale, count, candidates, width)
            kernel[grid](*arguments, **BLOCKS, BLOCK_D=BLOCK_D, num_warps=WARPS, num_stages=2)
        return grad_outputs, grad_rows, None, None, None, None


@triton.jit  # type: ignore[untyped-decorator]
def _add_product(a, b, total):  # type: ignore[no-untyped-def]
    """total + a b, added up in float32."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit  # type: ignore[untyped-decorator]
def _scores(h, e, n, u, N, U, D, scale, BLOCK_N: tl.constexpr, BLOCK_U: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """[n, u]: h_i.e_u / T in float32; 0 outside."""
    scores = tl.zeros((BLOCK_N, BLOCK_U), tl.float32)
    for first in range(0, D, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        left = tl.load(h + n[:, None] * D + k[None, :], mask=(n[:, None] < N) & (k[None, :] < D), other=0.0)
        right = tl.load(e + u[None, :] * D + k[:, None], mask=(u[None, :] < U) & (k[:, None] < D), other=0.0)
        scores = _add_product(left, right, scores)
    return scores * scale


@triton.jit  # type: ignore[untyped-decorator]
def _biased(scores, is_positive, u, bias, positive_bias_n, U):  # type: ignore[no-untyped-def]
    """Adds biases: the positive's to positives, the candidate's to all others; -inf outside."""
    bias_u = tl.load(bias + u, mask=u < U, other=-float("inf"))
    return tl.where(is_positive, scores + positive_bias_n[:, None], scores + bias_u[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _forward(  # type: ignore[no-untyped-def]
    h, e, positive, bias, positive_bias, lse, positive_score, scale, N, U, D,
    BLOCK_N: tl.constexpr, BLOCK_U: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """lse and positive score of a block of outputs, passing over all candidates with a running maximum."""
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    positive_n = tl.load(positive + n, mask=n < N, other=-1)
    positive_bias_n = tl.load(positive_bias + n, mask=n < N, other=0.0)
    top_n = tl.full((BLOCK_N,), -1e38, tl.float32)
    total_n = tl.zeros((BLOCK_N,), tl.float32)
    positive_score_n = tl.zeros((BLOCK_N,), tl.float32)
    for first in range(0, U, BLOCK_U):
        u = (first + tl.arange(0, BLOCK_U)).to(tl.int64)
        scores = _scores(h, e, n, u, N, U, D, scale, BLOCK_N, BLOCK_U, BLOCK_K)
        is_positive = u[None, :] == positive_n[:, None]
        positive_score_n += tl.sum(tl.where(is_positive, scores, 0.0), 1)
        scores = _biased(scores, is_positive, u, bias, positive_bias_n, U)
        higher_n = tl.maximum(top_n, tl.max(scores, 1))
        total_n = total_n * tl.exp(top_n - higher_n) + tl.sum(tl.exp(scores - higher_n[:, None]), 1)
        top_n = higher_n
    tl.store(lse + n, top_n + tl.log(total_n), mask=n < N)
    tl.store(positive_score + n, positive_score_n, mask=n < N)


@triton.jit  # type: ignore[untyped-decorator]
def _residuals(  # type: ignore[no-untyped-def]
    h, e, positive_n, bias, positive_bias_n, lse_n, n, u, scale, N, U, D,
    BLOCK_N: tl.constexpr, BLOCK_U: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """[n, u]: probability, minus 1 at the positive: the gradient of the scores; 0 outside."""
    scores = _scores(h, e, n, u, N, U, D, scale, BLOCK_N, BLOCK_U, BLOCK_K)
    is_positive = u[None, :] == positive_n[:, None]
    scores = _biased(scores, is_positive, u, bias, positive_bias_n, U)
    return tl.exp(scores - lse_n[:, None]) - tl.where(is_positive, 1.0, 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _to_outputs(  # type: ignore[no-untyped-def]
    h, e, positive, bias, positive_bias, lse, slope, gradient, scale, N, U, D,
    BLOCK_N: tl.constexpr, BLOCK_U: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A block [n, d] of the outputs' gradient: residuals times rows, over all candidates."""
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    positive_n = tl.load(positive + n, mask=n < N, other=-1)
    positive_bias_n = tl.load(positive_bias + n, mask=n < N, other=0.0)
    lse_n = tl.load(lse + n, mask=n < N, other=float("inf"))
    total = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for first in range(0, U, BLOCK_U):
        u = (first + tl.arange(0, BLOCK_U)).to(tl.int64)
        residuals = _residuals(
            h, e, positive_n, bias, positive_bias_n, lse_n, n, u, scale, N, U, D, BLOCK_N, BLOCK_U, BLOCK_K
        )
        rows = tl.load(e + u[:, None] * D + d[None, :], mask=(u[:, None] < U) & (d[None, :] < D), other=0.0)
        total = _add_product(residuals.to(rows.dtype), rows, total)
    total *= tl.load(slope)
    inside = (n[:, None] < N) & (d[None, :] < D)
    tl.store(gradient + n[:, None] * D + d[None, :], total.to(gradient.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _to_rows(  # type: ignore[no-untyped-def]
    h, e, positive, bias, positive_bias, lse, slope, gradient, scale, N, U, D,
    BLOCK_N: tl.constexpr, BLOCK_U: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A block [u, d] of the rows' gradient: residuals, transposed, times outputs, over all outputs."""
    u = (tl.program_id(0) * BLOCK_U + tl.arange(0, BLOCK_U)).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_U, BLOCK_D), tl.float32)
    for first in range(0, N, BLOCK_N):
        n = (first + tl.arange(0, BLOCK_N)).to(tl.int64)
        positive_n = tl.load(positive + n, mask=n < N, other=-1)
        positive_bias_n = tl.load(positive_bias + n, mask=n < N, other=0.0)
        lse_n = tl.load(lse + n, mask=n < N, other=float("inf"))
        residuals = _residuals(
            h, e, positive_n, bias, positive_bias_n, lse_n, n, u, scale, N, U, D, BLOCK_N, BLOCK_U, BLOCK_K
        )
        outputs = tl.load(h + n[:, None] * D + d[None, :], mask=(n[:, None] < N) & (d[None, :] < D), other=0.0)
        total = _add_product(tl.trans(residuals.to(outputs.dtype)), outputs, total)
    total *= tl.load(slope)
    inside = (u[:, None] < U) & (d[None, :] < D)
    tl.store(gradient + u[:, None] * D + d[None, :], total.to(gradient.dtype.element_ty), mask=inside)
