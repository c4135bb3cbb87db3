"""Activation checkpointing: what is not kept for the backward pass is computed again there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

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
