"""Attention backends: which there are, where each can be used, and the choice among them.

On CUDA in half precision `auto` takes a kernel for sequences of differing lengths: flash-attn 2, 3 or 4 where one is
installed, else torch's own. A CPU goes document by document. Measured on one CPU core, forward and backward, 2 rows x
2,048 tokens in 4 documents each, 8 heads of 64: mask 613 ms, document by document 198 ms, and 330 ms for causal
attention without documents. Only short rows in bf16 go under a mask there (`cpu_attention`).

B rows, T tokens, H heads (of this rank), d dimensions of a head.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megahead.errors import ConfigError
from megahead.nn import cpu_attention
from megahead.nn.attention_kernels import (
    DenseAttention,
    FlashAttention,
    VarlenAttention,
    attend_masked,
    attend_per_document,
    attend_rows,
    attend_varlen,
    load_flash2,
    load_flash3,
    load_flash4,
)
from megahead.nn.documents import Documents


class Attend(Protocol):
    """[B, T, H, d]: softmax(q k / sqrt(d)) v, each token over itself and its predecessors in its document.

    Without `causal` over its whole document. Under local attention only what is within `documents.window` counts.
    """

    def __call__(
        self,
        q_BTHd: Tensor,
        k_BTHd: Tensor,
        v_BTHd: Tensor,
        documents: Documents,
        dropout: float = 0.0,
        *,
        causal: bool = True,
    ) -> Tensor: ...


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
    q_BTHd: Tensor,
    k_BTHd: Tensor,
    v_BTHd: Tensor,
    documents: Documents,
    dropout: float = 0.0,
    *,
    causal: bool = True,
) -> Tensor:
    """As `Attend` describes, by the best backend for these tensors."""
    local, masked = documents.window is not None, cpu_attention.serves_masked(q_BTHd, q_BTHd.shape[1], dropout)
    spec = AttentionSpec(q_BTHd.device, q_BTHd.dtype, q_BTHd.shape[-1], dropout, local, masked)
    backend = choose_backend("auto", spec)
    return backend.attend(q_BTHd, k_BTHd, v_BTHd, documents, dropout, causal=causal)


@dataclass(frozen=True)
class Backend:
    """One way to compute attention, and where it can be used."""

    name: str
    varlen: VarlenAttention
    """Where rows may have several documents, or tokens see a window of theirs."""
    description: str
    dense: DenseAttention | None = attend_rows
    """Where each row is one document, seen as a whole; None: by `varlen` as well."""
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
        self,
        q_BTHd: Tensor,
        k_BTHd: Tensor,
        v_BTHd: Tensor,
        documents: Documents,
        dropout: float = 0.0,
        *,
        causal: bool = True,
    ) -> Tensor:
        """As `Attend` describes."""
        if documents.need_no_mask and self.dense is not None:
            return self.dense(q_BTHd, k_BTHd, v_BTHd, dropout, causal)
        return self.varlen(q_BTHd, k_BTHd, v_BTHd, documents, dropout, causal)

    def obstacle(self, spec: AttentionSpec) -> str:
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
    return Backend(
        name,
        FlashAttention(load, supports_dropout).varlen,
        description,
        dense=None,
        kernel=(module, "flash_attn_varlen_func"),
        supports_dropout=supports_dropout,
        **where,
    )


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
    """The backend named `wanted`, for `auto` the best one that serves `spec`; ConfigError with the reason why not.

    `auto` on a CPU is document by document, or by a mask; on other devices the former would synchronise.
    """
    if wanted == "auto":
        if spec.device.type == "cpu":
            return BACKENDS["sdpa" if spec.masked else "documents"]
        return next(backend for backend in BACKENDS.values() if not backend.obstacle(spec))
    backend = BACKENDS[wanted]
    if obstacle := backend.obstacle(spec):
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
