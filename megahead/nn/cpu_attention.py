"""Attention of bf16 rows on a CPU: forward by torch's kernel, backward in the fastest of three ways.

torch's CPU kernel computes bf16 forward on the matrix units. Its backward pass costs much for each call in bf16: for
documents of 16 to 128 tokens 3 to 7 times as long as in fp32, conversions included. So

- few scores go back in fp32, by the same kernel;
- many scores of up to 512 tokens a row by five bf16 products, of so many heads at once that their scores stay in the
  processor's cache: mostly 1.2 to 2.1 times as fast as in fp32 (32 x 2 heads of 64, 128 tokens: 14.1 -> 6.6 ms; 8 x 4
  heads of 32, 128 tokens, where it does not pay: 2.8 -> 3.6 ms);
- longer rows by torch's bf16 kernel, which skips what a causal row does not see.

(one core with AVX512-BF16, the other busy, torch 2.13)

B rows, H heads, M queries and T tokens of a row (as many, but for the targets of an encoder's last block), d dimensions
of a head; C heads at once.
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


def serves(q_BHMd: Tensor, k_BKTd: Tensor, dropout: float) -> bool:
    """Whether `half_rows` serves here and pays: bf16 on a CPU, short rows, and no dropout, which the kernel lacks."""
    tokens, head_size = k_BKTd.shape[-2:]
    short = 0 < tokens * head_size <= _LARGEST_IN_FP32 or _pays_by_products(q_BHMd, k_BKTd)
    here = q_BHMd.device.type == "cpu" and q_BHMd.dtype == torch.bfloat16
    return here and short and q_BHMd.numel() > 0 and dropout == 0.0


def half_rows(q_BHMd: Tensor, k_BHTd: Tensor, v_BHTd: Tensor, causal: bool) -> Tensor:
    """[B, H, M, d]: as `scaled_dot_product_attention`; its backward pass is this module's. `causal`: M is T."""
    way = _ByProducts if _pays_by_products(q_BHMd, k_BHTd) else _InFp32
    output: Tensor = way.apply(q_BHMd, k_BHTd, v_BHTd, causal)
    return output


def _pays_by_products(q_BHMd: Tensor, k_BKTd: Tensor) -> bool:
    (rows, heads, queries, _), tokens = q_BHMd.shape, k_BKTd.shape[-2]
    return tokens <= _LONGEST_BY_PRODUCTS and rows * heads * queries * tokens >= _LEAST_BY_PRODUCTS


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
        queries, tokens = q.shape[-2], k.shape[-2]
        at_once = max(1, _SCORES_AT_ONCE // (queries * tokens))
        rows = (x.reshape(-1, *x.shape[-2:]).split(at_once) for x in (q, k, v, gradient))
        mask_MT = q.new_full((queries, tokens), -inf).triu(1) if ctx.causal else q.new_zeros(())
        found = zip(*(_gradients(mask_MT, *heads) for heads in zip(*rows, strict=True)), strict=True)
        return *(torch.cat(parts).view(x.shape) for parts, x in zip(found, (q, k, v), strict=True)), None


def _gradients(
    mask_MT: Tensor, q_CMd: Tensor, k_CTd: Tensor, v_CTd: Tensor, gradient_CMd: Tensor
) -> tuple[Tensor, ...]:
    """Of q, k and v. `mask_MT` is added to the scores."""
    scale = q_CMd.shape[-1] ** -0.5
    weights_CMT = torch.baddbmm(mask_MT, q_CMd, k_CTd.mT, alpha=scale).softmax(-1)
    to_weights_CMT = torch.bmm(gradient_CMd, v_CTd.mT)
    to_scores_CMT = torch._softmax_backward_data(to_weights_CMT, weights_CMT, -1, weights_CMT.dtype)
    to_q_CMd, to_k_CTd = torch.bmm(to_scores_CMT, k_CTd), torch.bmm(to_scores_CMT.mT, q_CMd)
    return to_q_CMd.mul_(scale), to_k_CTd.mul_(scale), torch.bmm(weights_CMT.mT, gradient_CMd)
