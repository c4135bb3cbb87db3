"""Llama (Touvron et al. 2023, arXiv 2302.13971), without its head; Qwen 2 and 3 and Mistral are settings of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from megahead.config.model import ModelConfig
from megahead.models.attention import Heads, SelfAttention
from megahead.models.backbone import Decoder
from megahead.models.blocks import Block
from megahead.models.layers import GatedMLP, RMSNorm
from megahead.models.parallel import SPLIT_HEADS, SPLIT_TOKENS, SPLIT_WEIGHTS


class Llama(Decoder):
    """RMS norms, rotary positions, a gated MLP after attention, whose keys and values may have fewer heads."""

    def __init__(self, config: ModelConfig) -> None:
        norm = partial(RMSNorm, config.hidden_size, eps=config.norm_eps)
        super().__init__(config, partial(_block, config, norm), norm)


def _block(config: ModelConfig, norm: Callable[[], nn.Module]) -> Block:
    heads = Heads(
        queries=config.num_heads,
        keys=config.key_heads(),
        size=config.head_size(),
        bias=config.attention_bias != "none",
        output_bias=config.attention_bias == "all",
        norm_eps=config.norm_eps if config.qk_norm else None,
    )
    return Block(
        norm(),
        SelfAttention(config.hidden_size, heads, causal=True, dropout=config.attention_dropout),
        norm(),
        GatedMLP(config.hidden_size, config.mlp_size(), config.activation, bias=config.mlp_bias),
        parallel=False,
        dropout=config.hidden_dropout,
    )


SHARDING = (
    SPLIT_WEIGHTS
    | SPLIT_HEADS
    | SPLIT_TOKENS
    | {
        "blocks.*.attention.query_norm": "head_norm",  # one weight for all heads
        "blocks.*.attention.key_norm": "head_norm",
        "blocks.*.mlp.gate": "column",
    }
)
"""How each module splits over a tensor group."""
