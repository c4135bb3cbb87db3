"""BERT (Devlin et al. 2019, arXiv 1810.04805), an encoder without pooler and head; DistilBERT is it without types.

B rows, T tokens a row, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megahead.config.model import ModelConfig
from megahead.models.attention import Heads, SelfAttention
from megahead.models.backbone import Backbone
from megahead.models.blocks import PostNormBlock
from megahead.models.documents import Documents
from megahead.models.layers import MLP, Embedding, LayerNorm
from megahead.models.parallel import SPLIT_HEADS, SPLIT_WEIGHTS


class Bert(Backbone):
    """Tokens, positions and types summed and normed, then post-norm blocks. All tokens have the first type.

    Rows are full of packed text, so nothing is computed for padding; where a row is not full, what is left is a
    document of its own, which no other sees.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden_size = config.hidden_size
        self.dropout = config.hidden_dropout
        self.embedding = Embedding(config.padded_vocab_size(), hidden_size)
        self.positions = Embedding(config.max_positions, hidden_size)
        self.token_types = Embedding(config.token_types, hidden_size) if config.token_types else None
        self.embedding_norm = LayerNorm(hidden_size, eps=config.norm_eps)
        self.blocks = nn.ModuleList(_block(config) for _ in range(config.num_layers))

    def embedded(self, rows_BTD: Tensor, documents: Documents) -> Tensor:
        """[B, T, D]: the normed sum."""
        x_BTD = rows_BTD + self.positions(documents.positions_BT)
        if self.token_types is not None:
            x_BTD = x_BTD + self.token_types(torch.zeros((), dtype=torch.int64, device=rows_BTD.device))
        return F.dropout(self.embedding_norm(x_BTD), self.dropout, self.training)

    def views(self, documents: Documents) -> Sequence[tuple[Documents]]:
        """The same for each block."""
        return [(documents,)] * len(self.blocks)


def _block(config: ModelConfig) -> PostNormBlock:
    heads = Heads(config.num_heads, config.num_heads, config.head_size())
    return PostNormBlock(
        config.hidden_size,
        SelfAttention(config.hidden_size, heads, causal=config.is_causal, dropout=config.attention_dropout),
        MLP(config.hidden_size, config.mlp_size(), config.activation),
        norm_eps=config.norm_eps,
        dropout=config.hidden_dropout,
    )


SHARDING = SPLIT_WEIGHTS | SPLIT_HEADS
"""How each module splits over a tensor group; positions and types are small."""
