"""Transformer blocks: self-attention, the residual stream, recomputation in the backward pass, compilation.

B rows, T tokens, H heads and K key heads (of this rank), d dimensions of a head, D hidden size, N targets.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from megahead.distributed.group import Group, per_rank_rng
from megahead.models.attention_backends import (
    Attend,
    attend,
    attend_rows,
    bf16_attention,
    is_supported_masked,
    repeated,
)
from megahead.models.documents import Documents, TargetPositions, bias_of
from megahead.models.layers import MLP, GatedMLP, LayerNorm, RMSNorm, Rotation, apply_rotary, dropout

# Self-attention: with one joint projection (GPT-NeoX), or one each for queries, keys and values (BERT, Llama).


class Heads(NamedTuple):
    """How many heads there are, and what their projections are like."""

    queries: int
    keys: int
    """Heads of keys and values; each serves queries / keys heads (Ainslie et al. 2023, arXiv 2305.13245)."""

    size: int
    """Dimensions of each."""

    bias: bool = True
    """Of the projections that make queries, keys and values."""

    output_bias: bool = True
    """Of the one that joins the heads."""

    norm_eps: float | None = None
    """Queries and keys are normed head by head before they are compared; None: they are not."""

    joint: bool = False
    """Whether one projection makes queries, keys and values. Its rows are ordered head by head, within a head q, k, v:
    any contiguous run of heads is a contiguous run of rows."""


class HeadsLinear(nn.Linear):
    """A linear layer whose output features are `heads` of equal size."""

    def __init__(self, hidden_size: int, heads: int, head_size: int, bias: bool) -> None:
        super().__init__(hidden_size, heads * head_size, bias)
        self.heads = heads


class SelfAttention(nn.Module):
    """Multi-head attention over documents, causal or over both sides.

    The last block of an encoder can compute queries for a few tokens only. The number of heads is read from the
    projections' width, so that a rank may hold a part of them.
    """

    def __init__(self, hidden_size: int, heads: Heads, *, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.head_size, self.joint, self.causal, self.dropout = heads.size, heads.joint, causal, dropout
        self.group = Group()  # ranks that hold the other heads: each draws its own dropout
        self.attend: Attend = attend
        width = heads.queries * heads.size
        if heads.joint:
            self.qkv = nn.Linear(hidden_size, 3 * width, heads.bias)
        else:
            self.query = nn.Linear(hidden_size, width, heads.bias)
            self.key = HeadsLinear(hidden_size, heads.keys, heads.size, heads.bias)
            self.value = HeadsLinear(hidden_size, heads.keys, heads.size, heads.bias)
            self.query_norm = _norm(heads)
            self.key_norm = _norm(heads)
        self.output = nn.Linear(width, hidden_size, heads.output_bias)

    def forward(
        self, x_BTD: Tensor, rotation: Rotation | None, documents: Documents, targets: TargetPositions | None = None
    ) -> Tensor:
        """[B, T, D]: what each token reads from its document; with `targets` [N, D], for these alone.

        Without `rotation` positions must be in the input already.
        """
        q, k, v = self._projected(x_BTD, targets)
        if rotation is not None:
            q, k = apply_rotary(q, rotation if targets is None else rotation.at(targets)), apply_rotary(k, rotation)
        dropout = self.dropout if self.training else 0.0
        with per_rank_rng(self.group, x_BTD.device) if dropout else nullcontext():
            if targets is None:
                heads = self.attend(q, k, v, documents, dropout, self.causal)
            else:
                heads_BMHd = attend_at(targets.spread(q), k, v, documents, targets, dropout, self.causal)
                heads = targets.gather(heads_BMHd)
        mixed: Tensor = self.output(heads.flatten(-2))
        return mixed

    def _projected(self, x_BTD: Tensor, targets: TargetPositions | None) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, T, H, d], or [N, H, d] of the targets; k and v [B, T, K, d]."""
        if self.joint:
            q, k, v = self.qkv(x_BTD).unflatten(-1, (-1, 3, self.head_size)).unbind(-2)
            return q if targets is None else targets.take(q), k, v
        queried = x_BTD if targets is None else targets.take(x_BTD)
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_size))
            for layer, x in ((self.query, queried), (self.key, x_BTD), (self.value, x_BTD))
        )
        return self.query_norm(q), self.key_norm(k), v


def _norm(heads: Heads) -> nn.Module:
    return nn.Identity() if heads.norm_eps is None else RMSNorm(heads.size, eps=heads.norm_eps)


def attend_at(
    q_BMHd: Tensor,
    k_BTKd: Tensor,
    v_BTKd: Tensor,
    documents: Documents,
    targets: TargetPositions,
    dropout: float,
    causal: bool = False,
) -> Tensor:
    """[B, M, H, d]: softmax(q k / sqrt(d)) v of M queries a row over the document of each, within its window; `causal`:
    over what precedes them there."""
    if documents.need_no_mask and not causal:
        return attend_rows(q_BMHd, k_BTKd, v_BTKd, dropout, causal)
    q, k, v = (x.transpose(1, 2) for x in (q_BMHd, k_BTKd, v_BTKd))
    k, v = repeated(k, q.shape[1]), repeated(v, q.shape[1])
    mask_BMT = targets.mask(documents.causal_mask_BTT if causal else documents.mask_BTT)
    if is_supported_masked(q, k.shape[2], dropout):
        return bf16_attention(q, k, v, causal, bias_of(mask_BMT, q.dtype)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask_BMT[:, None], dropout_p=dropout).transpose(1, 2)


# Blocks around it, how they are recomputed in the backward pass, and how they are compiled.


class Block(nn.Module):
    """Parallel: `x + attention(norm x) + mlp(norm' x)`; sequential: the MLP reads the sum with attention."""

    def __init__(
        self,
        attention_norm: nn.Module,
        attention: SelfAttention,
        mlp_norm: nn.Module,
        mlp: MLP | GatedMLP,
        *,
        parallel: bool,
        dropout: float,
    ) -> None:
        super().__init__()
        self.parallel = parallel
        self.sequence_group = Group()  # ranks that hold the rows' other tokens: each draws its own dropout
        self.dropout = dropout
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def forward(
        self, x_BTD: Tensor, rotation: Rotation, documents: Documents, targets: TargetPositions | None = None
    ) -> Tensor:
        """[B, T, D]: the residual stream after this block.

        [N, D] with `targets`: keys and values of all tokens, everything else of the targets alone.
        """
        attended = self.attention(self.attention_norm(x_BTD), rotation, documents, targets)
        x = x_BTD if targets is None else targets.take(x_BTD)
        if self.parallel:
            return x + self._drop(attended) + self._drop(self.mlp(self.mlp_norm(x)))
        x = x + self._drop(attended)
        return x + self._drop(self.mlp(self.mlp_norm(x)))

    def _drop(self, added: Tensor) -> Tensor:
        return dropout(added, self.dropout, self.sequence_group, self.training)


class PostNormBlock(nn.Module):
    """`y = norm(x + attention(x))`, then `norm(y + mlp(y))`."""

    def __init__(
        self, hidden_size: int, attention: SelfAttention, mlp: MLP, *, norm_eps: float, dropout: float
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.attention = attention
        self.attention_norm = LayerNorm(hidden_size, eps=norm_eps)
        self.mlp = mlp
        self.mlp_norm = LayerNorm(hidden_size, eps=norm_eps)

    def forward(self, x_BTD: Tensor, documents: Documents, targets: TargetPositions | None = None) -> Tensor:
        """[B, T, D]; [N, D] with `targets`, the positions whose outputs are wanted (masked tokens): keys and values are
        computed for all tokens, everything else only for the targets."""
        x = x_BTD if targets is None else targets.take(x_BTD)
        rotation = None  # positions were added to the embeddings
        x = self.attention_norm(x + self._drop(self.attention(x_BTD, rotation, documents, targets)))
        output: Tensor = self.mlp_norm(x + self._drop(self.mlp(x)))
        return output

    def _drop(self, added: Tensor) -> Tensor:
        return F.dropout(added, self.dropout, self.training)


Recompute = bool | Literal["selective"]
"""False: all activations are kept. True: of a block its input alone. "selective": also what was costly to compute."""

_SAVED_OPERATORS = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "torch_attn::_varlen_attn",
        "flash_attn::_flash_attn_varlen_forward",
        "flash_attn_3::fwd",
        "flash_attn_3::_flash_attn_forward",  # since it is an operator of Python's around the former
    }
)
"""Products with weights, and attention where it is one operator: nearly all of a block's operations. flash-attn 4 is
none, so it is computed again."""


def checkpointed(block: Callable[..., Tensor], *inputs: object, selective: bool = False) -> Tensor:
    """`block(*inputs)`, computed again in the backward pass; dropout draws the same again.

    With `selective` results of matrix products and of attention are kept, and only what is between them is computed
    again: norms, activations, rotations. Nothing may write into a kept result (DeepSpeed's linear layers at ZeRO 3 do).
    """
    contexts: dict[str, Any] = {"context_fn": partial(create_selective_checkpoint_contexts, _policy)}
    output: Tensor = checkpoint(block, *inputs, use_reentrant=False, **(contexts if selective else {}))
    return output


def _policy(_: Any, operator: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
    """Attention with dropout is computed again: to skip it would shift the random numbers that are drawn after it."""
    schema = operator._schema
    given = {argument.name: value for argument, value in zip(schema.arguments, arguments, strict=False)} | named
    keep = schema.name in _SAVED_OPERATORS and not given.get("dropout_p")
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


class CompiledBlocks:
    """Calls blocks compiled; after the first failure, which gives a warning, as they are.

    Every new shape is compiled for. Results differ from those of the plain block by rounding, and dropout draws other
    numbers.
    """

    def __init__(self, **options: Any) -> None:
        """`options`: of `torch.compile`."""
        self.unsupported_reason = ""
        if "backend" not in options:  # torch 2.13 gives two bf16 sums of one loop the same name in C++
            options["options"] = {"cpp.max_horizontal_fusion_size": 1}
        self._compiled = torch.compile(_call, dynamic=False, **options)
        settings: Any = importlib.import_module("torch._functorch.config")
        settings.force_non_lazy_backward_lowering = True  # else a backward that cannot be compiled fails when it runs
        self._failure = torch._dynamo.exc.TorchDynamoException  # imported by now, and slow to import before

    def __call__(self, block: nn.Module, *inputs: object) -> Tensor:
        """`block(*inputs)`."""
        if not self.unsupported_reason:
            try:
                output: Tensor = self._compiled(block, *inputs)
                return output
            except self._failure as error:
                self.unsupported_reason = _summary(str(error))
                warnings.warn(f"blocks are not compiled: {self.unsupported_reason}", stacklevel=2)
        return _call(block, *inputs)


def _summary(error: str) -> str:
    """The first line of a long message, and the first after it that names an error."""
    first, *rest = error.splitlines()
    return " ".join([first, *[line for line in rest if "error" in line.lower()][:1]])


def _call(block: nn.Module, *inputs: object) -> Tensor:
    output: Tensor = block(*inputs)
    return output
