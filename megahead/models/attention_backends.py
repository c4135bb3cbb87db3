"""How attention over documents is computed: the backends, the choice among them, and the reference."""

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
from megahead.models.documents import Documents

# Attention of bf16 rows on a CPU: forward by torch's kernel, backward in the fastest of three ways.
#
# torch's own bf16 backward costs much for each call: for documents of 16 to 128 tokens 3 to 7 times as long as in fp32,
# conversions included. So few scores go back in fp32, by the same kernel; many scores of up to 512 tokens a row by five
# bf16 products, of so many rows at once that their scores stay in the cache (under a mask rows of several documents,
# too); longer rows by torch's bf16 kernel, which skips what a causal row does not see.
#
# B rows, H heads, M queries and T tokens of a row (as many, but for the targets of an encoder's last block), d
# dimensions of a head; C heads at once.


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


def is_supported(q_BHMd: Tensor, k_BKTd: Tensor, dropout: float) -> bool:
    """Whether `bf16_attention` works here and is faster: bf16 on a CPU, short rows, and no dropout."""
    tokens, head_size = k_BKTd.shape[-2:]
    short = 0 < tokens * head_size <= _LARGEST_IN_FP32 or _is_faster_by_products(q_BHMd, k_BKTd)
    here = q_BHMd.device.type == "cpu" and q_BHMd.dtype == torch.bfloat16
    return here and short and q_BHMd.numel() > 0 and dropout == 0.0


def is_supported_masked(q: Tensor, tokens: int, dropout: float) -> bool:
    """The same for rows of so many `tokens` in several documents, under a bias."""
    return q.numel() > 0 and is_faster_masked(q.device, q.dtype, tokens, dropout)


def is_faster_masked(device: torch.device, dtype: torch.dtype, tokens: int, dropout: float) -> bool:
    """`is_supported_masked`, before there are rows."""
    short = tokens <= _LONGEST_BY_PRODUCTS
    return device.type == "cpu" and dtype == torch.bfloat16 and short and dropout == 0.0


def bf16_attention(
    q_BHMd: Tensor, k_BHTd: Tensor, v_BHTd: Tensor, causal: bool, bias_BMT: Tensor | None = None
) -> Tensor:
    """[B, H, M, d]: as `scaled_dot_product_attention`; its backward pass is this module's. `causal`: M is T.

    `bias_BMT`, in q's dtype, is added to the scores of all heads and takes the place of `causal`: 0, or -inf where a
    query does not see a token.
    """
    if bias_BMT is not None or _is_faster_by_products(q_BHMd, k_BHTd):
        output: Tensor = _ByProducts.apply(q_BHMd, k_BHTd, v_BHTd, causal, bias_BMT)
    else:
        output = _InFp32.apply(q_BHMd, k_BHTd, v_BHTd, causal)
    return output


def _is_faster_by_products(q_BHMd: Tensor, k_BKTd: Tensor) -> bool:
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


def _fill_gradients(weights_CMT: Tensor, to_scores_CMT: Tensor, *rows: Tensor) -> None:
    """Fills in the last three. `weights_CMT` holds the bias; scores are kept there and in `to_scores_CMT`."""
    gradient_CMd, q_CMd, k_CTd, v_CTd, to_q_CMd, to_k_CTd, to_v_CTd = rows
    scale = q_CMd.shape[-1] ** -0.5
    torch.softmax(weights_CMT.baddbmm_(q_CMd, k_CTd.mT, alpha=scale), -1, out=weights_CMT)
    torch.bmm(weights_CMT.mT, gradient_CMd, out=to_v_CTd)
    torch.bmm(gradient_CMd, v_CTd.mT, out=to_scores_CMT)
    _softmax_backward(to_scores_CMT, weights_CMT, -1, weights_CMT.dtype, grad_input=to_scores_CMT)
    to_q_CMd.baddbmm_(to_scores_CMT, k_CTd, beta=0, alpha=scale)
    to_k_CTd.baddbmm_(to_scores_CMT.mT, q_CMd, beta=0, alpha=scale)


# Local attention, where no kernel for it exists: a document is cut into pieces as long as the window. Measured on one
# CPU core, forward and backward, 2 rows x 2,048 tokens in one document each, 8 heads of 64: 164 ms for 64 tokens to
# each side, 832 ms for all. T tokens in P pieces of w (the window), each of which sees s = 3 w keys: its own, and those
# of the pieces before and behind it.


def attend_locally(q_THd: Tensor, k_THd: Tensor, v_THd: Tensor, window: int, dropout: float, causal: bool) -> Tensor:
    """[T, H, d]: softmax(q k / sqrt(d)) v over the keys of one document that are at most `window` tokens away.

    Costs 3 w T scores instead of T^2.
    """
    tokens = len(q_THd)
    pieces = -(-tokens // window)
    filled = pieces * window - tokens
    q_PHwd = F.pad(q_THd, (0, 0, 0, 0, 0, filled)).unflatten(0, (pieces, window)).transpose(1, 2)
    k_PHsd, v_PHsd = (
        F.pad(x, (0, 0, 0, 0, window, window + filled)).unfold(0, 3 * window, window).mT for x in (k_THd, v_THd)
    )
    mask_P1ws = _nearby(tokens, window, causal, q_THd.device)[:, None]
    near_PHwd = F.scaled_dot_product_attention(q_PHwd, k_PHsd, v_PHsd, attn_mask=mask_P1ws, dropout_p=dropout)
    return near_PHwd.transpose(1, 2).flatten(0, 1)[:tokens]


def _nearby(tokens: int, window: int, causal: bool, device: torch.device) -> Tensor:
    """[P, w, s] bool: which keys each token of a piece sees; those that fill up the last piece see some, too."""
    first_P11 = torch.arange(0, tokens, window, device=device)[:, None, None]
    query_Pw1 = first_P11 + torch.arange(window, device=device)[:, None]
    key_P1s = first_P11 + torch.arange(-window, 2 * window, device=device)
    distance_Pws = key_P1s - query_Pw1
    near_Pws = (distance_Pws >= -window) & (distance_Pws <= (0 if causal else window))
    return near_Pws & (key_P1s >= 0) & (key_P1s < tokens)


# The ways to compute attention over documents; `attend_masked` is the reference, the others do the same for less.
#
# Keys and values may have fewer heads than queries, each serving as many of these in turn. B rows, T tokens, H heads
# (of this rank), d dimensions of a head.


Attend = Callable[[Tensor, Tensor, Tensor, Documents, float, bool], Tensor]
"""[B, T, H, d]: softmax(q k / sqrt(d)) v, each token over its document, within `documents.window` where that is set.

Functions of q, k, v, documents, dropout, and causal: whether a token sees only itself and its predecessors.
"""

VARLEN_SHARES_KEYS = torch.__version__ >= "2.12"
"""Whether `varlen_attn` has `enable_gqa`; in torch 2.11 it has not."""


def attend_rows(q_BTHd: Tensor, k_BTHd: Tensor, v_BTHd: Tensor, dropout: float, causal: bool) -> Tensor:
    """Rows of one document each; torch chooses the kernel, but for short bf16 rows on a CPU."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTHd, k_BTHd, v_BTHd))
    if is_supported(q, k, dropout):
        k, v = repeated(k, q.shape[1]), repeated(v, q.shape[1])
        return bf16_attention(q, k, v, causal).transpose(1, 2)
    grouped = q.shape[1] != k.shape[1]
    heads = F.scaled_dot_product_attention(q, k, v, is_causal=causal, dropout_p=dropout, enable_gqa=grouped)
    return heads.transpose(1, 2)


def attend_masked(
    q_BTHd: Tensor, k_BTHd: Tensor, v_BTHd: Tensor, documents: Documents, dropout: float, causal: bool
) -> Tensor:
    """The reference for the other backends: every pair of a row is scored, then hidden by a mask."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTHd, k_BTHd, v_BTHd))
    k, v = repeated(k, q.shape[1]), repeated(v, q.shape[1])
    if is_supported_masked(q, k.shape[2], dropout):
        bias_BTT = documents.causal_half_bias_BTT if causal else documents.half_bias_BTT
        return bf16_attention(q, k, v, causal, bias_BTT).transpose(1, 2)
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
    window, outputs = documents.window, list[Tensor]()
    for q, k, v in parts:
        if window is None or len(q) <= window + 1:
            outputs.append(attend_rows(q[None], k[None], v[None], dropout, causal)[0])
        else:
            heads = q.shape[1]
            outputs.append(attend_locally(q, repeated(k, heads), repeated(v, heads), window, dropout, causal))
    return torch.cat(outputs).view_as(q_BTHd)


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


def load_flash2() -> Callable[..., Any]:
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func  # type: ignore[no-any-return]


def load_flash3() -> Callable[..., Any]:
    from flash_attn_interface import flash_attn_varlen_func

    return flash_attn_varlen_func  # type: ignore[no-any-return]


def load_flash4() -> Callable[..., Any]:
    from flash_attn.cute import flash_attn_varlen_func

    return flash_attn_varlen_func  # type: ignore[no-any-return]


# Which backends there are, where each can be used, and the choice among them.
#
# On CUDA in half precision `auto` takes a kernel for sequences of differing lengths: flash-attn 2, 3 or 4 where one is
# installed, else torch's own. A CPU goes document by document (measured on one core, forward and backward, 2 rows x
# 2,048 tokens in 4 documents each, 8 heads of 64: 198 ms, under a mask 613 ms), but for short rows in bf16.


class AttentionSpec(NamedTuple):
    """What a backend must support."""

    device: torch.device
    dtype: torch.dtype
    """The type of q, k and v."""
    head_size: int
    dropout: float = 0.0
    local: bool = False
    """Whether there are layers with local attention, whose tokens see a window of their document."""
    masked: bool = False
    """Whether a CPU is faster with rows under a mask than document by document."""


def attend(
    q_BTHd: Tensor, k_BTHd: Tensor, v_BTHd: Tensor, documents: Documents, dropout: float = 0.0, causal: bool = True
) -> Tensor:
    """An `Attend`: by the best backend for these tensors."""
    local, masked = documents.window is not None, is_supported_masked(q_BTHd, q_BTHd.shape[1], dropout)
    spec = AttentionSpec(q_BTHd.device, q_BTHd.dtype, q_BTHd.shape[-1], dropout, local, masked)
    backend = choose_backend("auto", spec)
    return backend.attend(q_BTHd, k_BTHd, v_BTHd, documents, dropout, causal)


@dataclass(frozen=True)
class Backend:
    """One way to compute attention, and where it can be used."""

    name: str
    varlen: Attend
    """Where rows may have several documents, or tokens see a window of theirs."""
    description: str
    dense: Callable[[Tensor, Tensor, Tensor, float, bool], Tensor] | None = attend_rows
    """The same without documents, where each row is one, seen as a whole; None: by `varlen` as well."""
    kernel: tuple[str, str] | None = None
    """Module and function; None where torch's own operators are all it takes."""
    generations: range = range(8, 100)
    """Major compute capabilities of the CUDA devices that `kernel` was made for."""
    head_sizes: range = range(8, 257, 8)
    supports_dropout: bool = True
    """Whether it can drop attention weights."""
    supports_local: bool = True
    """Whether it has local attention: a window to each side of a token."""
    traceable: bool = True
    """Whether `torch.compile` can trace it: not if the host reads lengths, or a kernel is not a torch operator."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Documents, dropout: float = 0.0, causal: bool = True
    ) -> Tensor:
        """An `Attend`."""
        if documents.need_no_mask and self.dense is not None:
            return self.dense(q, k, v, dropout, causal)
        return self.varlen(q, k, v, documents, dropout, causal)

    def unsupported_reason(self, spec: AttentionSpec) -> str:
        """Why it cannot serve `spec`; empty where it can."""
        if self.kernel is None:
            return ""
        if spec.device.type != "cuda":
            return f"it needs a CUDA device, not {spec.device.type}"
        generation = torch.cuda.get_device_capability(spec.device)[0]
        if generation not in self.generations:
            return f"it is not made for devices of compute capability {generation}.x"
        if spec.dtype not in (torch.float16, torch.bfloat16):
            return "it computes in bf16 or fp16 only"
        if spec.head_size not in self.head_sizes:
            return f"it has no heads of {spec.head_size} dimensions"
        if spec.dropout and not self.supports_dropout:
            return "it has no dropout of attention weights"
        if spec.local and not self.supports_local:
            return "it has no local attention"
        return _missing(*self.kernel)


def _flash(
    name: str,
    description: str,
    module: str,
    load: Callable[[], Callable[..., Any]],
    *,
    supports_dropout: bool = False,
    **where: Any,
) -> Backend:
    """One of flash-attn's generations, which differ in where they are imported from and in what they return; `load`
    imports it by an `import` statement, which `torch.compile` can trace."""

    def varlen(
        q_BTHd: Tensor, k_BTHd: Tensor, v_BTHd: Tensor, documents: Documents, dropout: float, causal: bool
    ) -> Tensor:
        cu_seqlens, longest, window = documents.cu_seqlens, q_BTHd.shape[1], documents.window
        found = load()(
            *(x.flatten(0, 1) for x in (q_BTHd, k_BTHd, v_BTHd)),
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            causal=causal,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **({} if window is None else {"window_size": (window, 0 if causal else window)}),
            **({"dropout_p": dropout} if supports_dropout else {}),
        )
        output: Tensor = found[0] if isinstance(found, tuple) else found  # some add the logsumexp
        return output.view_as(q_BTHd)

    kernel = module, "flash_attn_varlen_func"
    return Backend(name, varlen, description, dense=None, kernel=kernel, supports_dropout=supports_dropout, **where)


_FLASH4: dict[str, Any] = {
    "generations": range(9, 13),
    "head_sizes": range(8, 129, 8),
    "traceable": False,  # not a torch operator
    "supports_local": False,  # forward everywhere, backward on some devices in some versions
}

BACKENDS = {
    backend.name: backend
    for backend in (
        _flash("flash3", "flash-attn 3", "flash_attn_interface", load_flash3, generations=range(9, 10)),
        _flash("flash4", "flash-attn 4", "flash_attn.cute", load_flash4, **_FLASH4),
        _flash("flash2", "flash-attn 2", "flash_attn", load_flash2, head_sizes=range(1, 257), supports_dropout=True),
        Backend(
            "varlen",
            attend_varlen,
            "torch's kernel for sequences of differing lengths",
            kernel=("torch.nn.attention.varlen", "varlen_attn"),
        ),
        Backend("sdpa", attend_masked, "torch's scaled dot product, documents by a mask"),
        Backend("documents", attend_per_document, "torch's scaled dot product, document by document", traceable=False),
    )
}
"""By name; on a CUDA device `auto` takes the first of them that can serve."""


@cache
def choose_backend(wanted: str, spec: AttentionSpec) -> Backend:
    """The backend named `wanted`, for `auto` the best one that supports `spec`; ConfigError with the reason why
    not.

    `auto` on a CPU is document by document, or by a mask; on other devices the former would synchronise.
    """
    if wanted == "auto":
        if spec.device.type == "cpu":
            return BACKENDS["sdpa" if spec.masked else "documents"]
        return next(backend for backend in BACKENDS.values() if not backend.unsupported_reason(spec))
    backend = BACKENDS[wanted]
    if reason := backend.unsupported_reason(spec):
        raise ConfigError("engine.attention", "serve this run", got=f"`{wanted}`", hint=f"{reason}; try `auto`")
    return backend


@cache
def _missing(module: str, name: str) -> str:
    """Why the function cannot be imported (compiled modules fail in many ways); empty when it can."""
    try:
        getattr(importlib.import_module(module), name)
    except Exception as error:
        return f"{module}.{name} cannot be imported ({' '.join(str(error).split())})"
    return ""
