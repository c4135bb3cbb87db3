"""Attention of bf16 rows on a CPU: forward by torch's kernel, backward in the fastest of three ways.

torch's CPU kernel computes bf16 forward on the matrix units. Its backward pass costs much for each call in bf16: for
documents of 16 to 128 tokens 3 to 7 times as long as in fp32, conversions included. So

- few scores go back in fp32, by the same kernel;
- many scores of up to 512 tokens a row by five bf16 products, of so many heads at once that their scores stay in the
  processor's cache: 1.2 to 2.1 times as fast as in fp32 (32 x 2 heads of 64, 128 tokens: 14.1 -> 6.6 ms);
- longer rows by torch's bf16 kernel, which skips what a causal row does not see.

(one core with AVX512-BF16, the other busy, torch 2.13)

B rows, H heads, T tokens, d dimensions of a head; C heads at once.
"""

from __future__ import annotations

from math import inf
from typing import Any

import torch
from torch import Tensor

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

_LARGEST_IN_FP32 = 2**14
"""Tokens x dimensions of a head up to which fp32 is faster than torch's bf16: 512 tokens of 32, 256 of 64."""

_LONGEST_BY_PRODUCTS = 512
"""Tokens: above, a causal row wastes half of too many scores."""

_LEAST_BY_PRODUCTS = 2**17
"""Scores of a call; with fewer the calls themselves cost more than they gain."""

_SCORES_AT_ONCE = 2**18
"""512 KiB of bf16."""


def serves(x_BHTd: Tensor, dropout: float) -> bool:
    """Whether `half_rows` serves here and pays: bf16 on a CPU, short rows, and no dropout, which the kernel lacks."""
    tokens, head_size = x_BHTd.shape[-2:]
    short = 0 < tokens * head_size <= _LARGEST_IN_FP32 or _pays_by_products(x_BHTd)
    return x_BHTd.device.type == "cpu" and x_BHTd.dtype == torch.bfloat16 and short and dropout == 0.0


def half_rows(q_BHTd: Tensor, k_BHTd: Tensor, v_BHTd: Tensor, causal: bool) -> Tensor:
    """[B, H, T, d]: as `scaled_dot_product_attention`; its backward pass is this module's."""
    way = _ByProducts if _pays_by_products(q_BHTd) else _InFp32
    output: Tensor = way.apply(q_BHTd, k_BHTd, v_BHTd, causal)
    return output


def _pays_by_products(x_BHTd: Tensor) -> bool:
    rows, heads, tokens, _ = x_BHTd.shape
    return tokens <= _LONGEST_BY_PRODUCTS and rows * heads * tokens**2 >= _LEAST_BY_PRODUCTS


class _InFp32(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        output: Tensor
        output, logsumexp = _forward(q, k, v, 0.0, causal)
        ctx.save_for_backward(q, k, v, output, logsumexp)
        ctx.causal = causal
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *rows, logsumexp = ctx.saved_tensors
        in_fp32 = [x.float() for x in (gradient, *rows)]
        found = _backward(*in_fp32, logsumexp, 0.0, ctx.causal)
        return *(x.to(gradient.dtype) for x in found), None


class _ByProducts(torch.autograd.Function):
    """Backward computes the weights of attention anew, as softmax's of scores that are rounded to bf16."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.causal = causal
        output: Tensor = _forward(q, k, v, 0.0, causal)[0]
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        tokens, head_size = q.shape[-2:]
        rows = (x.reshape(-1, tokens, head_size).split(_heads_at_once(tokens)) for x in (q, k, v, gradient))
        mask_TT = gradient.new_full((tokens, tokens), -inf).triu(1) if ctx.causal else gradient.new_zeros(())
        found = zip(*(_gradients(mask_TT, *heads) for heads in zip(*rows, strict=True)), strict=True)
        return *(torch.cat(parts).view(q.shape) for parts in found), None


def _heads_at_once(tokens: int) -> int:
    return max(1, _SCORES_AT_ONCE // tokens**2)


def _gradients(
    mask_TT: Tensor, q_CTd: Tensor, k_CTd: Tensor, v_CTd: Tensor, gradient_CTd: Tensor
) -> tuple[Tensor, ...]:
    """Of q, k and v. `mask_TT` is added to the scores."""
    scale = q_CTd.shape[-1] ** -0.5
    weights_CTT = torch.baddbmm(mask_TT, q_CTd, k_CTd.mT, alpha=scale).softmax(-1)
    to_weights_CTT = torch.bmm(gradient_CTd, v_CTd.mT)
    to_scores_CTT = torch._softmax_backward_data(to_weights_CTT, weights_CTT, -1, weights_CTT.dtype)
    to_q_CTd, to_k_CTd = torch.bmm(to_scores_CTT, k_CTd), torch.bmm(to_scores_CTT.mT, q_CTd)
    return to_q_CTd.mul_(scale), to_k_CTd.mul_(scale), torch.bmm(weights_CTT.mT, gradient_CTd)
