"""Transformer blocks, how they are recomputed in the backward pass, and how they are compiled."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from megahead.distributed.group import Group
from megahead.models.attention import SelfAttention
from megahead.models.documents import Documents, TargetPositions
from megahead.models.layers import MLP, GatedMLP, LayerNorm, Rotation, dropout


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
