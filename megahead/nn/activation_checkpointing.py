"""Activations that are not kept for the backward pass but computed again there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Recompute = bool | Literal["selective"]
"""False: everything is kept. True: of a block its input alone. "selective": its input, and what was dear."""

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
    }
)
"""Products with weights, and attention where it is one operator: nearly all of a block's operations."""


def checkpointed(block: Callable[..., Tensor], *inputs: object, selective: bool = False) -> Tensor:
    """`block(*inputs)`, computed again in the backward pass; dropout draws the same again.

    With `selective` results of products and of attention are kept, and only what lies between them is done again:
    norms, activations, rotations. Nobody may write into such a result (DeepSpeed's linear layers at ZeRO 3 do).
    """
    contexts: dict[str, Any] = {"context_fn": partial(create_selective_checkpoint_contexts, _policy)}
    output: Tensor = checkpoint(block, *inputs, use_reentrant=False, **(contexts if selective else {}))
    return output


def _policy(_: Any, operator: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
    """Attention that drops weights is done again: to pass over it would shift what is drawn after it."""
    schema = operator._schema
    given = {argument.name: value for argument, value in zip(schema.arguments, arguments, strict=False)} | named
    keep = schema.name in _SAVED_OPERATORS and not given.get("dropout_p")
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
