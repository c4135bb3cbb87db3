"""Attention over documents: the backends, their selection, and the reference implementation."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from megahead.errors import ConfigError
from megahead.models.documents import Documents, mask_to_bias

# Attention of bf16 rows on a CPU: forward by torch's kernel, backward by the fastest of three implementations.
#
# torch's bf16 backward has a high cost per call: for documents of 16 to 128 tokens 3 to 7 times the time of fp32,
# conversions included. For few scores the backward pass uses the same kernel in fp32. For many scores and up to 512
# tokens a row (under a mask also of several documents) it uses five bf16 matrix products, in chunks of rows whose
# scores fit the cache. For longer rows it uses torch's bf16 kernel, which skips masked scores of causal rows.
#
# B rows, H heads (K of keys and values), M queries and T tokens of a row (M = T, except in an encoder's last block,
# where only targets are queries), d dimensions of a head; C heads of all rows of a chunk.


_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_softmax_backward = torch.ops.aten._softmax_backward_data.out

_MAX_FP32_SIZE = 2**14
"""Largest tokens x head dimensions for which fp32 is faster than torch's bf16: 512 x 32, 256 x 64."""

_MAX_MATMUL_TOKENS = 512
"""Longest rows for bf16 products, which do not skip masked causal scores."""

_MIN_MATMUL_SCORES = 2**17
"""Fewest scores for bf16 products; below, the overhead of calls exceeds the gain."""

_SCORES_PER_CHUNK = 2**20
"""Two buffers of this many bf16 numbers, 2 MiB each."""


def should_use_bf16_attention(q_BHMd: Tensor, k_BKTd: Tensor, dropout: float) -> bool:
    """Whether `bf16_attention` is supported and faster: bf16 on a CPU, short rows, and no dropout."""
    tokens, head_size = k_BKTd.shape[-2:]
    is_short = 0 < tokens * head_size <= _MAX_FP32_SIZE or _is_matmul_faster(q_BHMd, k_BKTd)
    is_cpu_bf16 = q_BHMd.device.type == "cpu" and q_BHMd.dtype == torch.bfloat16
    return is_cpu_bf16 and is_short and q_BHMd.numel() > 0 and dropout == 0.0


def should_use_masked_bf16_attention(q: Tensor, tokens: int, dropout: float) -> bool:
    """`should_use_bf16_attention` for rows of `tokens` tokens in several documents, which need a bias."""
    return q.numel() > 0 and is_masked_bf16_faster(q.device, q.dtype, tokens, dropout)


def is_masked_bf16_faster(device: torch.device, dtype: torch.dtype, tokens: int, dropout: float) -> bool:
    """`should_use_masked_bf16_attention` for any rows of `tokens` tokens."""
    return device.type == "cpu" and dtype == torch.bfloat16 and tokens <= _MAX_MATMUL_TOKENS and dropout == 0.0


def bf16_attention(
    q_BHMd: Tensor, k_BHTd: Tensor, v_BHTd: Tensor, causal: bool, bias_BMT: Tensor | None = None
) -> Tensor:
    """[B, H, M, d]: `scaled_dot_product_attention` with a faster backward pass. `causal` requires M = T.

    `bias_BMT`, in q's dtype, is added to the scores of all heads and replaces `causal`: 0, or -inf where a query does
    not attend to a token.
    """
    if bias_BMT is not None or _is_matmul_faster(q_BHMd, k_BHTd):
        output: Tensor = _MatmulBackwardAttention.apply(q_BHMd, k_BHTd, v_BHTd, causal, bias_BMT)
    else:
        output = _Fp32BackwardAttention.apply(q_BHMd, k_BHTd, v_BHTd, causal)
    return output


def _is_matmul_faster(q_BHMd: Tensor, k_BKTd: Tensor) -> bool:
    (rows, heads, queries, _), tokens = q_BHMd.shape, k_BKTd.shape[-2]
    return tokens <= _MAX_MATMUL_TOKENS and rows * heads * queries * tokens >= _MIN_MATMUL_SCORES


class _Fp32BackwardAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        output: Tensor
        output, logsumexp = _flash_forward(q, k, v, 0.0, causal)
        ctx.save_for_backward(q, k, v, output, logsumexp)
        ctx.causal = causal
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, logsumexp = ctx.saved_tensors
        fp32_inputs = [x.float() for x in (gradient, *tensors)]
        gradients = _flash_backward(*fp32_inputs, logsumexp, 0.0, ctx.causal)
        return *(x.to(gradient.dtype) for x in gradients), None


class _MatmulBackwardAttention(torch.autograd.Function):
    """The backward pass recomputes the attention weights, from scores rounded to bf16."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, bias_BMT: Tensor | None) -> Tensor:
        ctx.save_for_backward(q, k, v, bias_BMT)
        ctx.causal = causal
        bias_B1MT = None if bias_BMT is None else bias_BMT[:, None]
        output: Tensor = _flash_forward(q, k, v, 0.0, causal and bias_BMT is None, attn_mask=bias_B1MT)[0]
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return *_matmul_backward(gradient, *ctx.saved_tensors, ctx.causal), None, None


@torch.library.custom_op("megahead::attention_backward", mutates_args=())
def _matmul_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, bias_BMT: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, in chunks of rows. A custom operator, so that
    `torch.compile` does not trace it, which would make it slower."""
    (rows, heads, queries, _), tokens = q.shape, k.shape[2]
    if bias_BMT is None:
        bias_BMT = q.new_full((1, queries, tokens), -inf).triu(1) if causal else q.new_zeros(1, 1, 1)
    chunk_rows = min(rows, max(1, _SCORES_PER_CHUNK // (heads * queries * tokens)))
    buffers = q.new_empty(2, chunk_rows, heads, queries, tokens)
    inputs = [x.contiguous() for x in (gradient, q, k, v)]
    gradients = _empty_like(q), _empty_like(k), _empty_like(v)
    tensors = bias_BMT.expand(rows, -1, -1), *inputs, *gradients
    for bias, *parts in zip(*(x.split(chunk_rows) for x in tensors), strict=True):
        weights, grad_scores = buffers[:, : len(bias)]
        weights.copy_(bias[:, None])
        _fill_gradients(*(x.flatten(0, 1) for x in (weights, grad_scores, *parts)))
    return gradients


@_matmul_backward.register_fake
def _(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, bias_BMT: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_like(q), _empty_like(k), _empty_like(v)


def _empty_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fill_gradients(weights_CMT: Tensor, grad_scores_CMT: Tensor, *tensors: Tensor) -> None:
    """Writes the gradients of q, k and v, the last three of `tensors`. `weights_CMT`: the bias, overwritten by
    attention weights; `grad_scores_CMT`: a buffer."""
    grad_output_CMd, q_CMd, k_CTd, v_CTd, grad_q_CMd, grad_k_CTd, grad_v_CTd = tensors
    scale = q_CMd.shape[-1] ** -0.5
    torch.softmax(weights_CMT.baddbmm_(q_CMd, k_CTd.mT, alpha=scale), -1, out=weights_CMT)
    torch.bmm(weights_CMT.mT, grad_output_CMd, out=grad_v_CTd)
    torch.bmm(grad_output_CMd, v_CTd.mT, out=grad_scores_CMT)
    _softmax_backward(grad_scores_CMT, weights_CMT, -1, weights_CMT.dtype, grad_input=grad_scores_CMT)
    grad_q_CMd.baddbmm_(grad_scores_CMT, k_CTd, beta=0, alpha=scale)
    grad_k_CTd.baddbmm_(grad_scores_CMT.mT, q_CMd, beta=0, alpha=scale)


# Local attention without a kernel for it: a document's T tokens are split into P pieces of w tokens (the window). Each
# piece has s = 3 w keys: its own, the previous piece's and the next one's. Measured on one CPU core, forward and
# backward, 2 rows x 2,048 tokens in one document each, 8 heads of 64: 164 ms for 64 tokens to each side, 832 ms for
# full attention.


def attend_locally(q_THd: Tensor, k_THd: Tensor, v_THd: Tensor, window: int, dropout: float, causal: bool) -> Tensor:
    """[T, H, d]: softmax(q k / sqrt(d)) v over the keys of one document that are at most `window` tokens away.

    Costs 3 w T scores instead of T^2.
    """
    tokens = len(q_THd)
    pieces = -(-tokens // window)
    padding = pieces * window - tokens
    q_PHwd = F.pad(q_THd, (0, 0, 0, 0, 0, padding)).unflatten(0, (pieces, window)).transpose(1, 2)
    k_PHsd, v_PHsd = (
        F.pad(x, (0, 0, 0, 0, window, window + padding)).unfold(0, 3 * window, window).mT for x in (k_THd, v_THd)
    )
    mask_P1ws = _local_mask(tokens, window, causal, q_THd.device)[:, None]
    output_PHwd = F.scaled_dot_product_attention(q_PHwd, k_PHsd, v_PHsd, attn_mask=mask_P1ws, dropout_p=dropout)
    return output_PHwd.transpose(1, 2).flatten(0, 1)[:tokens]


def _local_mask(tokens: int, window: int, causal: bool, device: torch.device) -> Tensor:
    """[P, w, s] bool: the keys that each token of a piece attends to; at least one, also for padding tokens."""
    first_P11 = torch.arange(0, tokens, window, device=device)[:, None, None]
    query_Pw1 = first_P11 + torch.arange(window, device=device)[:, None]
    key_P1s = first_P11 + torch.arange(-window, 2 * window, device=device)
    distance_Pws = key_P1s - query_Pw1
    is_near_Pws = (distance_Pws >= -window) & (distance_Pws <= (0 if causal else window))
    return is_near_Pws & (key_P1s >= 0) & (key_P1s < tokens)


# Implementations of attention over documents; `attend_with_document_mask` is the reference, the others are equal and
# faster.
#
# Keys and values may have fewer heads than queries (grouped-query attention). B rows, T tokens, H heads (of this rank),
# d dimensions of a head.


AttentionFunction = Callable[[Tensor, Tensor, Tensor, Documents, float, bool], Tensor]
"""[B, T, H, d]: softmax(q k / sqrt(d)) v, each token over its document, within `documents.window` where that is set.

Functions of q, k, v, documents, dropout, and causal: whether a token attends only to itself and its predecessors.
"""

VARLEN_HAS_GQA = torch.__version__ >= "2.12"
"""Whether `varlen_attn` has `enable_gqa`; it is missing in torch 2.11."""


def attend_without_mask(q_BTHd: Tensor, k_BTHd: Tensor, v_BTHd: Tensor, dropout: float, causal: bool) -> Tensor:
    """Rows of one document each. torch selects the kernel, except for short bf16 rows on a CPU."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTHd, k_BTHd, v_BTHd))
    if should_use_bf16_attention(q, k, dropout):
        k, v = repeat_kv(k, q.shape[1]), repeat_kv(v, q.shape[1])
        return bf16_attention(q, k, v, causal).transpose(1, 2)
    is_grouped = q.shape[1] != k.shape[1]
    heads = F.scaled_dot_product_attention(q, k, v, is_causal=causal, dropout_p=dropout, enable_gqa=is_grouped)
    return heads.transpose(1, 2)


def attend_with_mask(q_BMHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor, mask_BMT: Tensor, dropout: float = 0.0) -> Tensor:
    """[B, M, H, d]: softmax(q k / sqrt(d)) v of M queries per row, each over the tokens where `mask_BMT` is True."""
    q, k, v = (x.transpose(1, 2) for x in (q_BMHd, k_BTKd, v_BTKd))
    k, v = repeat_kv(k, q.shape[1]), repeat_kv(v, q.shape[1])
    if should_use_masked_bf16_attention(q, k.shape[2], dropout):
        return bf16_attention(q, k, v, False, mask_to_bias(mask_BMT, q.dtype)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask_BMT[:, None], dropout_p=dropout).transpose(1, 2)


def attend_with_document_mask(
    q_BTHd: Tensor, k_BTHd: Tensor, v_BTHd: Tensor, documents: Documents, dropout: float, causal: bool
) -> Tensor:
    """The reference for the other backends: computes all scores of a row, and masks those across documents."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTHd, k_BTHd, v_BTHd))
    k, v = repeat_kv(k, q.shape[1]), repeat_kv(v, q.shape[1])
    if should_use_masked_bf16_attention(q, k.shape[2], dropout):
        bias_BTT = documents.causal_bf16_bias_BTT if causal else documents.bf16_bias_BTT
        return bf16_attention(q, k, v, causal, bias_BTT).transpose(1, 2)
    mask_B1TT = (documents.causal_mask_BTT if causal else documents.mask_BTT)[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask_B1TT, dropout_p=dropout).transpose(1, 2)


def repeat_kv(x: Tensor, heads: int) -> Tensor:
    """Repeats each key or value head (dim 1) consecutively up to `heads` heads, for kernels without grouped queries."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def attend_per_document(
    q_BTHd: Tensor, k_BTHd: Tensor, v_BTHd: Tensor, documents: Documents, dropout: float, causal: bool
) -> Tensor:
    """One call per document: no scores across documents. Splits and joins once, so backward copies once."""
    parts = zip(*(x.flatten(0, 1).split(documents.lengths) for x in (q_BTHd, k_BTHd, v_BTHd)), strict=True)
    window, outputs = documents.window, list[Tensor]()
    for q, k, v in parts:
        if window is None or len(q) <= window + 1:
            outputs.append(attend_without_mask(q[None], k[None], v[None], dropout, causal)[0])
        else:
            heads = q.shape[1]
            outputs.append(attend_locally(q, repeat_kv(k, heads), repeat_kv(v, heads), window, dropout, causal))
    return torch.cat(outputs).view_as(q_BTHd)


def attend_varlen(
    q_BTHd: Tensor, k_BTHd: Tensor, v_BTHd: Tensor, documents: Documents, dropout: float, causal: bool
) -> Tensor:
    """torch's kernel for sequences of different lengths. With dropout it calls the operator directly, since
    `varlen_attn` has no dropout."""
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (x.flatten(0, 1) for x in (q_BTHd, k_BTHd, v_BTHd))
    cu_seqlens, max_seqlen = documents.cu_seqlens, q_BTHd.shape[1]
    lengths = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    left = -1 if documents.window is None else documents.window
    right = 0 if causal else left
    if dropout or not VARLEN_HAS_GQA:
        k, v = repeat_kv(k, q.shape[1]), repeat_kv(v, q.shape[1])
    if dropout:
        window = {} if documents.window is None else {"window_size_left": left, "window_size_right": right}
        output = torch.ops.aten._flash_attention_forward(q, k, v, *lengths, dropout, causal, False, **window)[0]
    else:
        gqa: dict[str, Any] = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
        output = varlen_attn(q, k, v, *lengths, window_size=(left, right), **gqa)
    assert isinstance(output, Tensor)
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


# The backends, the devices and dtypes that each supports, and their selection.
#
# On CUDA in half precision `auto` is a kernel for sequences of different lengths: flash-attn 2, 3 or 4 if installed,
# else torch's. On a CPU it computes document by document (measured on one core, forward and backward, 2 rows x 2,048
# tokens in 4 documents each, 8 heads of 64: 198 ms, with a mask 613 ms), except for short rows in bf16.


class AttentionSpec(NamedTuple):
    """The properties of a run that a backend must support."""

    device: torch.device
    dtype: torch.dtype
    """The type of q, k and v."""
    head_size: int
    dropout: float = 0.0
    local: bool = False
    """Whether there are layers with local (sliding-window) attention."""
    masked: bool = False
    """Whether a CPU is faster with masked rows than document by document."""


def attend(
    q_BTHd: Tensor, k_BTHd: Tensor, v_BTHd: Tensor, documents: Documents, dropout: float = 0.0, causal: bool = True
) -> Tensor:
    """An `AttentionFunction` that calls the best backend for these tensors."""
    local, masked = documents.window is not None, should_use_masked_bf16_attention(q_BTHd, q_BTHd.shape[1], dropout)
    spec = AttentionSpec(q_BTHd.device, q_BTHd.dtype, q_BTHd.shape[-1], dropout, local, masked)
    backend = choose_backend("auto", spec)
    return backend.attend(q_BTHd, k_BTHd, v_BTHd, documents, dropout, causal)


@dataclass(frozen=True)
class Backend:
    """An implementation of attention, and what it supports."""

    name: str
    varlen: AttentionFunction
    """For rows of several documents, and for local attention."""
    description: str
    dense: Callable[[Tensor, Tensor, Tensor, float, bool], Tensor] | None = attend_without_mask
    """For rows of one document each with full attention; None: `varlen`."""
    kernel: tuple[str, str] | None = None
    """Module and function; None if it needs only torch operators."""
    compute_capabilities: range = range(8, 100)
    """Major compute capabilities of the CUDA devices that `kernel` supports."""
    head_sizes: range = range(8, 257, 8)
    supports_dropout: bool = True
    """Whether it supports dropout of attention weights."""
    supports_local: bool = True
    """Whether it supports local attention: a window to each side of a token."""
    is_traceable: bool = True
    """Whether `torch.compile` can trace it: false if the host reads lengths, or a kernel is not a torch operator."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Documents, dropout: float = 0.0, causal: bool = True
    ) -> Tensor:
        """An `AttentionFunction`."""
        if not documents.needs_mask and self.dense is not None:
            return self.dense(q, k, v, dropout, causal)
        return self.varlen(q, k, v, documents, dropout, causal)

    def unsupported_reason(self, spec: AttentionSpec) -> str:
        """The reason why it does not support `spec`; empty if it does."""
        if self.kernel is None:
            return ""
        if spec.device.type != "cuda":
            return f"it needs a CUDA device, not {spec.device.type}"
        major = torch.cuda.get_device_capability(spec.device)[0]
        if major not in self.compute_capabilities:
            return f"it is not made for devices of compute capability {major}.x"
        if spec.dtype not in (torch.float16, torch.bfloat16):
            return "it computes in bf16 or fp16 only"
        if spec.head_size not in self.head_sizes:
            return f"it has no heads of {spec.head_size} dimensions"
        if spec.dropout and not self.supports_dropout:
            return "it has no dropout of attention weights"
        if spec.local and not self.supports_local:
            return "it has no local attention"
        return _import_error(*self.kernel)


def _flash_backend(
    name: str,
    description: str,
    module: str,
    load: Callable[[], Callable[..., Any]],
    *,
    supports_dropout: bool = False,
    **limits: Any,
) -> Backend:
    """The backend of a flash-attn version; versions differ in module and return type. `load` imports the function by an
    `import` statement, which `torch.compile` can trace."""

    def varlen(
        q_BTHd: Tensor, k_BTHd: Tensor, v_BTHd: Tensor, documents: Documents, dropout: float, causal: bool
    ) -> Tensor:
        cu_seqlens, max_seqlen, window = documents.cu_seqlens, q_BTHd.shape[1], documents.window
        result = load()(
            *(x.flatten(0, 1) for x in (q_BTHd, k_BTHd, v_BTHd)),
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            max_seqlen_q=max_seqlen,
            max_seqlen_k=max_seqlen,
            causal=causal,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **({} if window is None else {"window_size": (window, 0 if causal else window)}),
            **({"dropout_p": dropout} if supports_dropout else {}),
        )
        output: Tensor = result[0] if isinstance(result, tuple) else result  # some versions add the logsumexp
        return output.view_as(q_BTHd)

    kernel = module, "flash_attn_varlen_func"
    return Backend(name, varlen, description, dense=None, kernel=kernel, supports_dropout=supports_dropout, **limits)


_FLASH4_LIMITS: dict[str, Any] = {
    "compute_capabilities": range(9, 13),
    "head_sizes": range(8, 129, 8),
    "is_traceable": False,  # not a torch operator
    "supports_local": False,  # its backward pass supports it only on some devices in some versions
}

BACKENDS = {
    backend.name: backend
    for backend in (
        _flash_backend(
            "flash3", "flash-attn 3", "flash_attn_interface", load_flash3, compute_capabilities=range(9, 10)
        ),
        _flash_backend("flash4", "flash-attn 4", "flash_attn.cute", load_flash4, **_FLASH4_LIMITS),
        _flash_backend(
            "flash2", "flash-attn 2", "flash_attn", load_flash2, head_sizes=range(1, 257), supports_dropout=True
        ),
        Backend(
            "varlen",
            attend_varlen,
            "torch's kernel for sequences of different lengths",
            kernel=("torch.nn.attention.varlen", "varlen_attn"),
        ),
        Backend("sdpa", attend_with_document_mask, "torch's scaled dot product, documents by a mask"),
        Backend(
            "documents", attend_per_document, "torch's scaled dot product, document by document", is_traceable=False
        ),
    )
}
"""By name; on a CUDA device `auto` is the first one that supports the run."""


@cache
def choose_backend(name: str, spec: AttentionSpec) -> Backend:
    """The backend `name`, for `auto` the best one that supports `spec`; ConfigError with the reason if `name` does not.

    On a CPU `auto` is `documents` or `sdpa`; on other devices `documents` would synchronize.
    """
    if name == "auto":
        if spec.device.type == "cpu":
            return BACKENDS["sdpa" if spec.masked else "documents"]
        return next(backend for backend in BACKENDS.values() if not backend.unsupported_reason(spec))
    backend = BACKENDS[name]
    if reason := backend.unsupported_reason(spec):
        raise ConfigError("engine.attention", "serve this run", got=f"`{name}`", hint=f"{reason}; try `auto`")
    return backend


@cache
def _import_error(module: str, name: str) -> str:
    """The reason why the function cannot be imported (compiled modules fail in many ways); empty if it can."""
    try:
        getattr(importlib.import_module(module), name)
    except Exception as error:
        return f"{module}.{name} cannot be imported ({' '.join(str(error).split())})"
    return ""
