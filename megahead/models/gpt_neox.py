"""GPT-NeoX (Black et al. 2022, arXiv 2204.06745), the decoder of the Pythia suite, without its head."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from megahead.config.model import ModelConfig
from megahead.models.attention import Heads, SelfAttention
from megahead.models.backbone import Decoder
from megahead.models.blocks import Block
from megahead.models.layers import MLP, LayerNorm
from megahead.models.parallel import SPLIT_TOKENS, SPLIT_WEIGHTS


class GPTNeoX(Decoder):
    """Layer norms, rotary positions on a part of each head, attention and MLP side by side."""

    def __init__(self, config: ModelConfig) -> None:
        norm = partial(LayerNorm, config.hidden_size, eps=config.norm_eps)
        super().__init__(config, partial(_block, config, norm), norm)


def _block(config: ModelConfig, norm: Callable[[], nn.Module]) -> Block:
    heads = Heads(config.num_heads, config.num_heads, config.head_size(), joint=True)
    return Block(
        norm(),
        SelfAttention(config.hidden_size, heads, causal=True, dropout=config.attention_dropout),
        norm(),
        MLP(config.hidden_size, config.mlp_size(), config.activation),
        parallel=config.parallel_residual,
        dropout=config.hidden_dropout,
    )


SHARDING = SPLIT_WEIGHTS | SPLIT_TOKENS | {"blocks.*.attention.qkv": "column"}  # whole heads
"""How each module splits over a tensor group."""
