"""Transformer blocks: self-attention, the residual stream, recomputation in the backward pass, compilation.

B rows, T tokens, H heads and K key heads (of this rank), d dimensions of a head, D hidden size, N targets, in each row
padded to M.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from megahead.config.model import ModelConfig
from megahead.distributed.group import Group, per_rank_rng
from megahead.models.attention_backends import AttentionFunction, attend, attend_with_mask, attend_without_mask
from megahead.models.documents import Documents, TargetPositions
from megahead.models.layers import MLP, Rotation, apply_rotary, build_norm, dropout

# Self-attention: with a fused QKV projection (GPT-NeoX), or separate query, key and value projections (BERT, Llama).


class HeadsLinear(nn.Linear):
    """A linear layer whose output features are `heads` heads of equal size."""

    def __init__(self, hidden_size: int, heads: int, head_size: int, bias: bool) -> None:
        super().__init__(hidden_size, heads * head_size, bias)
        self.heads = heads


class SelfAttention(nn.Module):
    """Multi-head attention over documents, causal or bidirectional.

    The last block of an encoder can compute only the targets' queries. The number of heads follows from the
    projections' width, so that a rank may have a part of the heads.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden_size, head_size, has_bias = config.hidden_size, config.head_size(), config.attention_bias != "none"
        width, key_heads = config.num_heads * head_size, config.key_heads()
        self.head_size, self.causal, self.dropout = head_size, config.is_causal, config.attention_dropout
        self.query_factor = (head_size / config.query_scalar()) ** 0.5  # scores are divided by sqrt(head_size)
        self.group = Group()  # ranks with the other heads: each has its own dropout masks
        self.attend: AttentionFunction = attend
        self.fused_qkv = config.family == "gpt_neox"
        if self.fused_qkv:  # rows by head, within a head q, k, v: contiguous heads are contiguous rows
            self.qkv = nn.Linear(hidden_size, 3 * width, has_bias)
        else:  # maybe grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245)
            self.query = nn.Linear(hidden_size, width, has_bias)
            self.key = HeadsLinear(hidden_size, key_heads, head_size, has_bias)
            self.value = HeadsLinear(hidden_size, key_heads, head_size, has_bias)
            self.query_norm = build_norm(config, head_size) if config.qk_norm else nn.Identity()
            self.key_norm = build_norm(config, head_size) if config.qk_norm else nn.Identity()
        self.output = nn.Linear(width, hidden_size, config.attention_bias == "all")

    def forward(
        self, x_BTD: Tensor, rotation: Rotation | None, documents: Documents, targets: TargetPositions | None = None
    ) -> Tensor:
        """[B, T, D]: the attention output of each token; with `targets` only theirs, [N, D].

        Without `rotation` the input must contain position embeddings.
        """
        if self.fused_qkv and rotation is not None and targets is None:
            q, k, v = self._project_and_rotate(x_BTD, rotation)
        else:
            q, k, v = self._project(x_BTD, targets)
            if rotation is not None:
                q = apply_rotary(q, rotation if targets is None else rotation.select(targets))
                k = apply_rotary(k, rotation)
        dropout = self.dropout if self.training else 0.0
        with per_rank_rng(self.group, x_BTD.device) if dropout else nullcontext():
            if targets is None:
                heads = self.attend(q, k, v, documents, dropout, self.causal)
            elif not documents.needs_mask and not self.causal:
                heads = targets.unpad(attend_without_mask(targets.pad(q), k, v, dropout, causal=False))
            else:
                mask_BMT = targets.mask(documents.causal_mask_BTT if self.causal else documents.mask_BTT)
                heads = targets.unpad(attend_with_mask(targets.pad(q), k, v, mask_BMT, dropout))
        output: Tensor = self.output(heads.flatten(-2))
        return output

    def _project_and_rotate(self, x_BTD: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """As `_project`, with queries and keys rotated: together, which takes half as many kernels."""
        qkv_BTH3d = self.qkv(x_BTD).unflatten(-1, (-1, 3, self.head_size))
        qk_BTH2d, v_BTH1d = qkv_BTH3d.split([2, 1], dim=-2)
        q, k = apply_rotary(qk_BTH2d, rotation.over_query_and_key()).unbind(-2)
        return q, k, v_BTH1d.squeeze(-2)

    def _project(self, x_BTD: Tensor, targets: TargetPositions | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, T, H, d], or [N, H, d] of the targets; keys and values [B, T, K, d]."""
        if self.fused_qkv:
            q, k, v = self.qkv(x_BTD).unflatten(-1, (-1, 3, self.head_size)).unbind(-2)
            return q if targets is None else targets.select(q), k, v
        x_query = x_BTD if targets is None else targets.select(x_BTD)
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_size))
            for layer, x in ((self.query, x_query), (self.key, x_BTD), (self.value, x_BTD))
        )
        q, k = self.query_norm(q), self.key_norm(k)
        return q if self.query_factor == 1.0 else q * self.query_factor, k, v


def set_attention(module: nn.Module, attend: AttentionFunction) -> None:
    """Sets the attention function of all layers in `module`, whose device and precision it must support."""
    for layer in module.modules():
        if isinstance(layer, SelfAttention):
            layer.attend = attend


# Blocks, their recomputation in the backward pass, and their compilation.


def build_mlp(config: ModelConfig) -> MLP:
    """The MLP of a block."""
    sizes = config.hidden_size, config.mlp_size(), config.activation
    return MLP(*sizes, gated=config.has_gated_mlp(), bias=config.mlp_bias)


class Block(nn.Module):
    """A pre-norm block. Parallel: `x + attention(norm x) + mlp(norm' x)`; sequential: `y = x + attention(norm x)`, then
    `y + mlp(norm' y)`."""

    def __init__(self, config: ModelConfig, *, has_normed_input: bool = False) -> None:
        """`has_normed_input`: the input is normed already, so that there is no attention norm."""
        super().__init__()
        self.parallel = config.parallel_residual
        self.sequence_group = Group()  # ranks with the rows' other tokens: each has its own dropout masks
        self.dropout = config.hidden_dropout
        self.attention_norm = nn.Identity() if has_normed_input else build_norm(config)
        self.attention = SelfAttention(config)
        self.mlp_norm = build_norm(config)
        self.mlp = build_mlp(config)

    def forward(
        self, x_BTD: Tensor, rotation: Rotation | None, documents: Documents, targets: TargetPositions | None = None
    ) -> Tensor:
        """[B, T, D]: the residual stream after this block.

        [N, D] with `targets`: computes keys and values of all tokens, everything else only of the targets.
        """
        attended = self.attention(self.attention_norm(x_BTD), rotation, documents, targets)
        x = x_BTD if targets is None else targets.select(x_BTD)
        if self.parallel:
            return x + self._dropout(attended) + self._dropout(self.mlp(self.mlp_norm(x)))
        x = x + self._dropout(attended)
        return x + self._dropout(self.mlp(self.mlp_norm(x)))

    def _dropout(self, x: Tensor) -> Tensor:
        return dropout(x, self.dropout, self.sequence_group, self.training)


class PostNormBlock(nn.Module):
    """A post-norm block: `y = norm(x + attention(x))`, then `norm(y + mlp(y))`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dropout = config.hidden_dropout
        self.attention = SelfAttention(config)
        self.attention_norm = build_norm(config)
        self.mlp = build_mlp(config)
        self.mlp_norm = build_norm(config)

    def forward(self, x_BTD: Tensor, documents: Documents, targets: TargetPositions | None = None) -> Tensor:
        """[B, T, D]; [N, D] with `targets` (masked tokens): computes keys and values of all tokens, everything else
        only of the targets."""
        x = x_BTD if targets is None else targets.select(x_BTD)
        rotation = None  # positions were added to the embeddings
        x = self.attention_norm(x + self._dropout(self.attention(x_BTD, rotation, documents, targets)))
        output: Tensor = self.mlp_norm(x + self._dropout(self.mlp(x)))
        return output

    def _dropout(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


Recompute = bool | Literal["selective"]
"""Activations saved for the backward pass. False: all. True: only each block's input. "selective": also the results of
costly operators."""

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
        "flash_attn_3::_flash_attn_forward",  # in newer versions a Python operator around the former
    }
)
"""Products with weights, and attention that is one operator: nearly all of a block's FLOPs. flash-attn 4 is not an
operator, so it is recomputed."""


def checkpoint_block(block: Callable[..., Tensor], *inputs: object, selective: bool = False) -> Tensor:
    """`block(*inputs)`, recomputed in the backward pass with the same dropout masks.

    With `selective` the results of matrix products and attention are saved, and only the operations between them are
    recomputed: norms, activations, rotations. No in-place operation may write to a saved result (DeepSpeed's linear
    layers at ZeRO 3 do).
    """
    contexts: dict[str, Any] = {"context_fn": partial(create_selective_checkpoint_contexts, _checkpoint_policy)}
    output: Tensor = checkpoint(block, *inputs, use_reentrant=False, **(contexts if selective else {}))
    return output


def _checkpoint_policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Recomputes attention with dropout: skipping it would change the random numbers of later operators."""
    schema = operator._schema
    arguments = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
    should_save = schema.name in _SAVED_OPERATORS and not arguments.get("dropout_p")
    return CheckpointPolicy.MUST_SAVE if should_save else CheckpointPolicy.PREFER_RECOMPUTE


class CompiledBlocks:
    """Runs blocks compiled; warns at the first failure, and runs them eagerly from then on.

    Recompiles for every new shape. Results differ from those of the eager block by rounding and dropout masks.
    """

    def __init__(self, **options: Any) -> None:
        """`options`: of `torch.compile`."""
        self.unsupported_reason = ""
        if "backend" not in options:  # torch 2.13 gives two bf16 sums of one loop the same name in C++
            options["options"] = {"cpp.max_horizontal_fusion_size": 1}
        self._compiled = torch.compile(_call_block, dynamic=False, **options)
        functorch_config: Any = importlib.import_module("torch._functorch.config")
        # compiles backward with forward, so that failures show
        functorch_config.force_non_lazy_backward_lowering = True
        self._compile_error = torch._dynamo.exc.TorchDynamoException  # a slow import, done by torch.compile

    def __call__(self, block: nn.Module, *inputs: object) -> Tensor:
        """`block(*inputs)`."""
        if not self.unsupported_reason:
            try:
                output: Tensor = self._compiled(block, *inputs)
                return output
            except self._compile_error as error:
                self.unsupported_reason = _summarize_error(str(error))
                warnings.warn(f"blocks are not compiled: {self.unsupported_reason}", stacklevel=2)
        return _call_block(block, *inputs)


def _summarize_error(error: str) -> str:
    """The first line of a message, and the next line that contains "error"."""
    first_line, *lines = error.splitlines() or [""]
    return " ".join([first_line, *[line for line in lines if "error" in line.lower()][:1]])


def _call_block(block: nn.Module, *inputs: object) -> Tensor:
    output: Tensor = block(*inputs)
    return output
