"""GPT-NeoX (Black et al. 2022, arXiv 2204.06745), the decoder of the Pythia suite, without its head."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from megahead.config.model import ModelConfig
from megahead.models.attention import CausalSelfAttention
from megahead.models.backbone import Decoder
from megahead.models.blocks import Block
from megahead.models.layers import MLP, LayerNorm


class GPTNeoX(Decoder):
    """Layer norms, rotary positions on a part of each head, attention and MLP side by side."""

    def __init__(self, config: ModelConfig) -> None:
        norm = partial(LayerNorm, config.hidden_size, eps=config.norm_eps)
        super().__init__(config, partial(_block, config, norm), norm)


def _block(config: ModelConfig, norm: Callable[[], nn.Module]) -> Block:
    return Block(
        norm(),
        CausalSelfAttention(config.hidden_size, config.num_heads, config.attention_dropout),
        norm(),
        MLP(config.hidden_size, config.mlp_size(), config.activation),
        parallel=config.parallel_residual,
        dropout=config.hidden_dropout,
    )


SHARDING = {
    "": "tokens",
    "embedding": "vocabulary",  # rows of the table
    "blocks.*": "tokens",  # each rank draws its own dropout
    "blocks.*.attention_norm": "norm",
    "blocks.*.attention": "heads",  # each rank draws its own dropout
    "blocks.*.attention.qkv": "column",  # whole heads
    "blocks.*.attention.output": "row",
    "blocks.*.mlp_norm": "norm",
    "blocks.*.mlp.up": "column",
    "blocks.*.mlp.down": "row",
    "final_norm": "norm",
}
"""How each module splits over a tensor group; "tokens" and "norm" matter under sequence parallelism only. What is not
named here is held in full by every rank."""
