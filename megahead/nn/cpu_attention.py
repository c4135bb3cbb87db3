"""Attention of bf16 rows on a CPU: forward by torch's kernel, backward in the fastest of three ways.

torch's CPU kernel computes bf16 forward on the matrix units. Its backward pass costs much for each call in bf16: for
documents of 16 to 128 tokens 3 to 7 times as long as in fp32, conversions included. So

- few scores go back in fp32, by the same kernel;
- many scores of up to 512 tokens a row by five bf16 products, of so many rows at once that their scores stay in the
  processor's cache; rows of several documents, too, under a mask, as a call for each document would cost more;
- longer rows by torch's bf16 kernel, which skips what a causal row does not see.

What it gains in whole steps: docs/performance.md.

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
_softmax_backward = torch.ops.aten._softmax_backward_data.out

_LARGEST_IN_FP32 = 2**14
"""Tokens x dimensions of a head up to which fp32 is faster than torch's bf16: 512 tokens of 32, 256 of 64."""

_LONGEST_BY_PRODUCTS = 512
"""Tokens: above, a causal row wastes half of too many scores."""

_LEAST_BY_PRODUCTS = 2**17
"""Scores of a call; with fewer the calls themselves cost more than they gain."""

_SCORES_AT_ONCE = 2**20
"""2 MiB of bf16, twice."""


def serves(q_BHMd: Tensor, k_BKTd: Tensor, dropout: float) -> bool:
    """Whether `half_rows` serves here and pays: bf16 on a CPU, short rows, and no dropout, which the kernel lacks."""
    tokens, head_size = k_BKTd.shape[-2:]
    short = 0 < tokens * head_size <= _LARGEST_IN_FP32 or _pays_by_products(q_BHMd, k_BKTd)
    here = q_BHMd.device.type == "cpu" and q_BHMd.dtype == torch.bfloat16
    return here and short and q_BHMd.numel() > 0 and dropout == 0.0


def serves_masked(q: Tensor, tokens: int, dropout: float) -> bool:
    """Whether `half_rows` serves, and pays, for rows of so many `tokens` in several documents, under a bias."""
    return q.numel() > 0 and pays_masked(q.device, q.dtype, tokens, dropout)


def pays_masked(device: torch.device, dtype: torch.dtype, tokens: int, dropout: float) -> bool:
    """`serves_masked`, before there are rows."""
    short = tokens <= _LONGEST_BY_PRODUCTS
    return device.type == "cpu" and dtype == torch.bfloat16 and short and dropout == 0.0


def half_rows(q_BHMd: Tensor, k_BHTd: Tensor, v_BHTd: Tensor, causal: bool, bias_BMT: Tensor | None = None) -> Tensor:
    """[B, H, M, d]: as `scaled_dot_product_attention`; its backward pass is this module's. `causal`: M is T.

    `bias_BMT`, in q's dtype, is added to the scores of all heads and takes the place of `causal`: 0, or -inf where a
    query does not see a token.
    """
    if bias_BMT is not None or _pays_by_products(q_BHMd, k_BHTd):
        output: Tensor = _ByProducts.apply(q_BHMd, k_BHTd, v_BHTd, causal, bias_BMT)
    else:
        output = _InFp32.apply(q_BHMd, k_BHTd, v_BHTd, causal)
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
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, bias_BMT: Tensor | None) -> Tensor:
        ctx.save_for_backward(q, k, v, bias_BMT)
        ctx.causal = causal
        if bias_BMT is None:
            output: Tensor = _forward(q, k, v, 0.0, causal)[0]
        else:
            output = _forward(q, k, v, 0.0, False, attn_mask=bias_BMT[:, None])[0]
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return *_by_products(gradient, *ctx.saved_tensors, ctx.causal), None, None


@torch.library.custom_op("megahead::attention_backward", mutates_args=())
def _by_products(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, bias_BMT: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, a few rows at once. An operator, as what `torch.compile` makes of it is slower."""
    (rows, heads, queries, _), tokens = q.shape, k.shape[2]
    if bias_BMT is None:
        bias_BMT = q.new_full((1, queries, tokens), -inf).triu(1) if causal else q.new_zeros(1, 1, 1)
    at_once = min(rows, max(1, _SCORES_AT_ONCE // (heads * queries * tokens)))
    room = q.new_empty(2, at_once, heads, queries, tokens)
    given = [x.contiguous() for x in (gradient, q, k, v)]
    found = _like(q), _like(k), _like(v)
    by_row = bias_BMT.expand(rows, -1, -1), *given, *found
    for bias, *parts in zip(*(x.split(at_once) for x in by_row), strict=True):
        weights, to_scores = room[:, : len(bias)]
        weights.copy_(bias[:, None])
        _fill_gradients(*(x.flatten(0, 1) for x in (weights, to_scores, *parts)))
    return found


@_by_products.register_fake
def _(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, bias_BMT: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _like(q), _like(k), _like(v)


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fill_gradients(
    weights_CMT: Tensor,
    to_scores_CMT: Tensor,
    gradient_CMd: Tensor,
    q_CMd: Tensor,
    k_CTd: Tensor,
    v_CTd: Tensor,
    to_q_CMd: Tensor,
    to_k_CTd: Tensor,
    to_v_CTd: Tensor,
) -> None:
    """Fills in the last three. `weights_CMT` holds the bias; scores are kept there and in `to_scores_CMT`."""
    scale = q_CMd.shape[-1] ** -0.5
    torch.softmax(weights_CMT.baddbmm_(q_CMd, k_CTd.mT, alpha=scale), -1, out=weights_CMT)
    torch.bmm(weights_CMT.mT, gradient_CMd, out=to_v_CTd)
    torch.bmm(gradient_CMd, v_CTd.mT, out=to_scores_CMT)
    _softmax_backward(to_scores_CMT, weights_CMT, -1, weights_CMT.dtype, grad_input=to_scores_CMT)
    to_q_CMd.baddbmm_(to_scores_CMT, k_CTd, beta=0, alpha=scale)
    to_k_CTd.baddbmm_(to_scores_CMT.mT, q_CMd, beta=0, alpha=scale)
