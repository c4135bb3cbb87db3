"""The ways to compute attention over documents, and the choice among them.

`attend_masked` states what is computed; the others compute the same with less work. On CUDA in half precision that is a
kernel for sequences of differing lengths: flash-attn 2, 3 or 4 where one is installed, else torch's own. A CPU goes
document by document. Measured on one CPU core, forward and backward, 2 rows x 2,048 tokens in 4 documents each, 8 heads
of 64: mask 613 ms, document by document 198 ms, and 330 ms for causal attention without documents.

B rows, T tokens, H heads (of this rank), d dimensions of a head, N = B * T tokens.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from megahead.errors import ConfigError
from megahead.nn.documents import Documents


class Attend(Protocol):
    """[B, T, H, d]: softmax(q k / sqrt(d)) v, each token over itself and its predecessors in its document.

    Without `causal` over its whole document. Without `documents` a row is one document.
    """

    def __call__(
        self,
        q_BTHd: Tensor,
        k_BTHd: Tensor,
        v_BTHd: Tensor,
        documents: Documents | None,
        dropout: float = 0.0,
        *,
        causal: bool = True,
    ) -> Tensor: ...


class AttentionSpec(NamedTuple):
    """What attention is to be computed for, as far as back ends differ."""

    device: torch.device
    dtype: torch.dtype
    """Of q, k and v."""
    head_size: int
    dropout: float = 0.0


def attend(
    q_BTHd: Tensor,
    k_BTHd: Tensor,
    v_BTHd: Tensor,
    documents: Documents | None,
    dropout: float = 0.0,
    *,
    causal: bool = True,
) -> Tensor:
    """As `Attend` says, by whatever serves these tensors best."""
    backend = choose_backend("auto", AttentionSpec(q_BTHd.device, q_BTHd.dtype, q_BTHd.shape[-1], dropout))
    return backend.attend(q_BTHd, k_BTHd, v_BTHd, documents, dropout, causal=causal)


DenseAttention = Callable[[Tensor, Tensor, Tensor, float, bool], Tensor]
"""Of q, k, v, dropout and causal, where each row is one document."""

VarlenAttention = Callable[[Tensor, Tensor, Tensor, Documents, float, bool], Tensor]
"""Of q, k, v, documents, dropout and causal."""


def attend_rows(q_BTHd: Tensor, k_BTHd: Tensor, v_BTHd: Tensor, dropout: float, causal: bool) -> Tensor:
    """Rows of one document each; torch chooses the kernel."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTHd, k_BTHd, v_BTHd))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, dropout_p=dropout).transpose(1, 2)


def attend_masked(
    q_BTHd: Tensor, k_BTHd: Tensor, v_BTHd: Tensor, documents: Documents, dropout: float, causal: bool
) -> Tensor:
    """The plain way: every pair of a row is scored, then hidden by a boolean mask (the other ways' reference)."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTHd, k_BTHd, v_BTHd))
    mask_B1TT = (documents.causal_mask_BTT if causal else documents.same_document_BTT)[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask_B1TT, dropout_p=dropout).transpose(1, 2)


def attend_per_document(
    q_BTHd: Tensor, k_BTHd: Tensor, v_BTHd: Tensor, documents: Documents, dropout: float, causal: bool
) -> Tensor:
    """One call per document: pairs across documents cost nothing. Split and joined once, so backward copies once."""
    parts = zip(*(x.flatten(0, 1).split(documents.lengths) for x in (q_BTHd, k_BTHd, v_BTHd)), strict=True)
    outputs = [attend_rows(q[None], k[None], v[None], dropout, causal)[0] for q, k, v in parts]
    return torch.cat(outputs).view_as(q_BTHd)


def attend_varlen(
    q_BTHd: Tensor, k_BTHd: Tensor, v_BTHd: Tensor, documents: Documents, dropout: float, causal: bool
) -> Tensor:
    """torch's own kernel for documents, which drops nothing."""
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (x.flatten(0, 1) for x in (q_BTHd, k_BTHd, v_BTHd))
    cu_seqlens, longest = documents.cu_seqlens, q_BTHd.shape[1]
    window = (-1, 0) if causal else (-1, -1)
    output = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, window_size=window)
    assert isinstance(output, Tensor)
    return output.view_as(q_BTHd)


@dataclass(frozen=True)
class _FlashAttention:
    """One of flash-attn's generations, which differ in where they are imported from and in what they return."""

    module: str
    drops: bool = False

    def whole(self, q_BTHd: Tensor, k_BTHd: Tensor, v_BTHd: Tensor, dropout: float, causal: bool) -> Tensor:
        rows, length = q_BTHd.shape[:2]
        return self._between(
            Documents.cu_seqlens_of_rows(rows, length, q_BTHd.device), q_BTHd, k_BTHd, v_BTHd, dropout, causal
        )

    def packed(
        self, q_BTHd: Tensor, k_BTHd: Tensor, v_BTHd: Tensor, documents: Documents, dropout: float, causal: bool
    ) -> Tensor:
        return self._between(documents.cu_seqlens, q_BTHd, k_BTHd, v_BTHd, dropout, causal)

    def _between(
        self, cu_seqlens: Tensor, q_BTHd: Tensor, k_BTHd: Tensor, v_BTHd: Tensor, dropout: float, causal: bool
    ) -> Tensor:
        longest = q_BTHd.shape[1]
        flash_attn_varlen_func = importlib.import_module(self.module).flash_attn_varlen_func
        found = flash_attn_varlen_func(
            *(x.flatten(0, 1) for x in (q_BTHd, k_BTHd, v_BTHd)),
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            causal=causal,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **({"dropout_p": dropout} if self.drops else {}),
        )
        output: Tensor = found[0] if isinstance(found, tuple) else found  # some add the logsumexp
        return output.view_as(q_BTHd)


@dataclass(frozen=True)
class Backend:
    """One way to compute attention, and where it can be used."""

    name: str
    packed: VarlenAttention
    about: str
    whole: DenseAttention = attend_rows
    kernel: tuple[str, str] | None = None
    """Module and function; None where torch's own operators are all it takes."""
    generations: range = range(8, 100)
    """Of CUDA devices (major compute capability) that `kernel` was made for."""
    head_sizes: range = range(8, 257, 8)
    drops: bool = True
    """Whether it can drop attention weights."""
    traceable: bool = True
    """Whether `torch.compile` can look into it: not where lengths differ from batch to batch, or where operators are
    none of torch's."""

    def attend(
        self,
        q_BTHd: Tensor,
        k_BTHd: Tensor,
        v_BTHd: Tensor,
        documents: Documents | None,
        dropout: float = 0.0,
        *,
        causal: bool = True,
    ) -> Tensor:
        """As `Attend` says."""
        if documents is None:
            return self.whole(q_BTHd, k_BTHd, v_BTHd, dropout, causal)
        return self.packed(q_BTHd, k_BTHd, v_BTHd, documents, dropout, causal)

    def obstacle(self, use: AttentionSpec) -> str:
        """Why it cannot serve `use`; empty where it can."""
        if self.kernel is None:
            return ""
        if use.device.type != "cuda":
            return f"it needs a CUDA device, not {use.device.type}"
        generation = torch.cuda.get_device_capability(use.device)[0]
        if generation not in self.generations:
            return f"it is not made for devices of compute capability {generation}.x"
        if use.dtype not in (torch.float16, torch.bfloat16):
            return "it computes in bf16 or fp16 only"
        if use.head_size not in self.head_sizes:
            return f"it has no heads of {use.head_size} dimensions"
        if use.dropout and not self.drops:
            return "it has no dropout of attention weights"
        return _missing(*self.kernel)


def _flash(name: str, about: str, module: str, **where: Any) -> Backend:
    drops = where.setdefault("drops", False)
    flash, kernel = _FlashAttention(module, drops), (module, "flash_attn_varlen_func")
    return Backend(name, flash.packed, about, flash.whole, kernel, traceable=False, **where)


BACKENDS = {
    backend.name: backend
    for backend in (
        _flash("flash3", "flash-attn 3", "flash_attn_interface", generations=range(9, 10)),
        _flash("flash4", "flash-attn 4", "flash_attn.cute", generations=range(9, 13), head_sizes=range(8, 129, 8)),
        _flash("flash2", "flash-attn 2", "flash_attn", head_sizes=range(1, 257), drops=True),
        Backend(
            "varlen",
            attend_varlen,
            "torch's kernel for sequences of differing lengths",
            kernel=("torch.nn.attention.varlen", "varlen_attn"),
            drops=False,
            traceable=False,
        ),
        Backend("sdpa", attend_masked, "torch's scaled dot product, documents by a mask"),
        Backend("documents", attend_per_document, "torch's scaled dot product, document by document", traceable=False),
    )
}
"""By name; on a device with kernels `auto` takes the first of them that can serve."""


@cache
def choose_backend(wanted: str, use: AttentionSpec) -> Backend:
    """The back end called `wanted`, or the best one that serves `use` for `auto`; ConfigError with the reason why not.

    `auto` on a CPU is document by document, which would wait for any other device.
    """
    if wanted == "auto":
        if use.device.type == "cpu":
            return BACKENDS["documents"]
        return next(backend for backend in BACKENDS.values() if not backend.obstacle(use))
    backend = BACKENDS[wanted]
    if obstacle := backend.obstacle(use):
        raise ConfigError("engine.attention", "serve this run", got=f"`{wanted}`", hint=f"{obstacle}; try `auto`")
    return backend


@cache
def _missing(module: str, name: str) -> str:
    """Why the function cannot be imported (compiled modules fail in many ways); empty when it can."""
    try:
        getattr(importlib.import_module(module), name)
    except Exception as error:
        return f"{module}.{name} cannot be imported ({' '.join(str(error).split())})"
    return ""
