"""Attention of bf16 rows on a CPU: forward in bf16, backward in whichever of bf16 and fp32 is the faster.

torch's CPU kernel computes bf16 forward on the matrix units, up to three times as fast as fp32. Its bf16 backward pass
costs much for each call whatever the length: for documents of 16 to 128 tokens 3 to 7 times as long as in fp32,
conversions included. For long ones it is the faster. (heads of 32 and 64, one core with AMX, torch 2.13)

B rows, H heads, T tokens, d dimensions of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

_LARGEST_IN_FP32 = 2**14
"""Tokens x dimensions of a head up to which backward is the faster in fp32: 512 tokens of 32, 256 of 64, 128 of 128."""


def serves(x_BHTd: Tensor, dropout: float) -> bool:
    """Whether `half_rows` serves here and pays: bf16 on a CPU, short rows, and no dropout, which the kernel lacks."""
    tokens, head_size = x_BHTd.shape[-2:]
    short = 0 < tokens * head_size <= _LARGEST_IN_FP32
    return x_BHTd.device.type == "cpu" and x_BHTd.dtype == torch.bfloat16 and short and dropout == 0.0


def half_rows(q_BHTd: Tensor, k_BHTd: Tensor, v_BHTd: Tensor, causal: bool) -> Tensor:
    """[B, H, T, d]: as `scaled_dot_product_attention`; its backward pass is computed in fp32."""
    output: Tensor = _HalfRows.apply(q_BHTd, k_BHTd, v_BHTd, causal)
    return output


class _HalfRows(torch.autograd.Function):
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
