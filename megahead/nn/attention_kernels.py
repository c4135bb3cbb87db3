"""The ways to compute attention over documents; `attend_masked` is the reference, the others do the same for less.

Keys and values may have fewer heads than queries, each serving as many of these in turn.
B rows, T tokens, H heads (of this rank), d dimensions of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megahead.nn import cpu_attention
from megahead.nn.documents import Documents
from megahead.nn.local_attention import attend_near

DenseAttention = Callable[[Tensor, Tensor, Tensor, float, bool], Tensor]
"""Functions of q, k, v, dropout and causal, where each row is one document, seen as a whole."""

VarlenAttention = Callable[[Tensor, Tensor, Tensor, Documents, float, bool], Tensor]
"""Functions of q, k, v, documents, dropout and causal."""

VARLEN_SHARES_KEYS = torch.__version__ >= "2.12"
"""Whether `varlen_attn` has `enable_gqa`; in torch 2.11 it has not."""


def attend_rows(q_BTHd: Tensor, k_BTHd: Tensor, v_BTHd: Tensor, dropout: float, causal: bool) -> Tensor:
    """Rows of one document each; torch chooses the kernel, but for short bf16 rows on a CPU."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTHd, k_BTHd, v_BTHd))
    if cpu_attention.serves(q, k, dropout):
        k, v = repeated(k, q.shape[1]), repeated(v, q.shape[1])
        return cpu_attention.half_rows(q, k, v, causal).transpose(1, 2)
    grouped = q.shape[1] != k.shape[1]
    heads = F.scaled_dot_product_attention(q, k, v, is_causal=causal, dropout_p=dropout, enable_gqa=grouped)
    return heads.transpose(1, 2)


def attend_masked(
    q_BTHd: Tensor, k_BTHd: Tensor, v_BTHd: Tensor, documents: Documents, dropout: float, causal: bool
) -> Tensor:
    """The reference for the other backends: every pair of a row is scored, then hidden by a mask."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTHd, k_BTHd, v_BTHd))
    k, v = repeated(k, q.shape[1]), repeated(v, q.shape[1])
    if cpu_attention.serves_masked(q, k.shape[2], dropout):
        bias_BTT = documents.causal_half_bias_BTT if causal else documents.half_bias_BTT
        return cpu_attention.half_rows(q, k, v, causal, bias_BTT).transpose(1, 2)
    mask_B1TT = (documents.causal_mask_BTT if causal else documents.mask_BTT)[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask_B1TT, dropout_p=dropout).transpose(1, 2)


def repeated(x: Tensor, heads: int) -> Tensor:
    """Each head (dim 1) as often in a row as makes `heads`; torch's kernels that take a mask on GPUs want that."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def attend_per_document(
    q_BTHd: Tensor, k_BTHd: Tensor, v_BTHd: Tensor, documents: Documents, dropout: float, causal: bool
) -> Tensor:
    """One call per document: pairs across documents cost nothing. Split and joined once, so backward copies once."""
    parts = zip(*(x.flatten(0, 1).split(documents.lengths) for x in (q_BTHd, k_BTHd, v_BTHd)), strict=True)
    outputs = [_attend_document(q, k, v, documents.window, dropout, causal) for q, k, v in parts]
    return torch.cat(outputs).view_as(q_BTHd)


def _attend_document(
    q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, window: int | None, dropout: float, causal: bool
) -> Tensor:
    tokens, heads = q_THd.shape[:2]
    if window is None or tokens <= window + 1:
        return attend_rows(q_THd[None], k_TKd[None], v_TKd[None], dropout, causal)[0]
    return attend_near(q_THd, repeated(k_TKd, heads), repeated(v_TKd, heads), window, dropout, causal)


def attend_varlen(
    q_BTHd: Tensor, k_BTHd: Tensor, v_BTHd: Tensor, documents: Documents, dropout: float, causal: bool
) -> Tensor:
    """torch's own kernel for sequences of differing lengths. `varlen_attn` has no dropout, its operator has."""
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (x.flatten(0, 1) for x in (q_BTHd, k_BTHd, v_BTHd))
    cu_seqlens, longest = documents.cu_seqlens, q_BTHd.shape[1]
    lengths = cu_seqlens, cu_seqlens, longest, longest
    far = -1 if documents.window is None else documents.window
    left, right = far, 0 if causal else far
    if dropout or not VARLEN_SHARES_KEYS:
        k, v = repeated(k, q.shape[1]), repeated(v, q.shape[1])
    if dropout:
        sides = {} if documents.window is None else {"window_size_left": left, "window_size_right": right}
        output = torch.ops.aten._flash_attention_forward(q, k, v, *lengths, dropout, causal, False, **sides)[0]
    else:
        shared: dict[str, Any] = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
        output = varlen_attn(q, k, v, *lengths, window_size=(left, right), **shared)
    assert isinstance(output, Tensor)
    return output.view_as(q_BTHd)


@dataclass(frozen=True)
class FlashAttention:
    """One of flash-attn's generations, which differ in where they are imported from and in what they return."""

    load: Callable[[], Callable[..., Any]]
    """Imports it; by an `import` statement, which `torch.compile` can trace."""
    supports_dropout: bool

    def varlen(
        self, q_BTHd: Tensor, k_BTHd: Tensor, v_BTHd: Tensor, documents: Documents, dropout: float, causal: bool
    ) -> Tensor:
        """[B, T, H, d], as by `attend_masked`."""
        cu_seqlens, longest, window = documents.cu_seqlens, q_BTHd.shape[1], documents.window
        found = self.load()(
            *(x.flatten(0, 1) for x in (q_BTHd, k_BTHd, v_BTHd)),
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            causal=causal,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **({} if window is None else {"window_size": (window, 0 if causal else window)}),
            **({"dropout_p": dropout} if self.supports_dropout else {}),
        )
        output: Tensor = found[0] if isinstance(found, tuple) else found  # some add the logsumexp
        return output.view_as(q_BTHd)


def load_flash2() -> Callable[..., Any]:
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func  # type: ignore[no-any-return]


def load_flash3() -> Callable[..., Any]:
    from flash_attn_interface import flash_attn_varlen_func

    return flash_attn_varlen_func  # type: ignore[no-any-return]


def load_flash4() -> Callable[..., Any]:
    from flash_attn.cute import flash_attn_varlen_func

    return flash_attn_varlen_func  # type: ignore[no-any-return]
