"""GPT-NeoX (Black et al. 2022, arXiv 2204.06745), the decoder of the Pythia suite, without its head.

B rows, T tokens a row, t those of them that this rank holds, D hidden size.
"""

from __future__ import annotations

from torch import Tensor, nn

from megahead.config import ModelConfig
from megahead.distributed import gather_from_group, scatter_to_group
from megahead.models.backbone import Backbone
from megahead.nn import MLP, Block, CausalSelfAttention, Documents, rotary_at


class GPTNeoX(Backbone):
    """Embedding, blocks, final norm; parameters only, nothing is kept in buffers."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.rotary_dims = config.rotary_dims()
        self.rotary_base = config.rotary_base
        self.embedding = nn.Embedding(config.padded_vocab_size(), config.hidden_size)
        self.blocks = nn.ModuleList(_block(config) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)

    def encode(self, rows_BTD: Tensor, documents: Documents) -> Tensor:
        """[B, T, D]: hidden states after the final norm; see `Backbone.encode`."""
        rotation = rotary_at(documents.positions_BT, self.rotary_dims, self.rotary_base)
        x_BtD = scatter_to_group(rows_BTD, self.sequence_group, dim=1)
        for block in self.blocks:
            x_BtD = self.run_block(block, x_BtD, rotation, documents)
        return gather_from_group(self.final_norm(x_BtD), self.sequence_group, dim=1)


def _block(config: ModelConfig) -> Block:
    return Block(
        config.hidden_size,
        CausalSelfAttention(config.hidden_size, config.num_heads, config.attention_dropout),
        MLP(config.hidden_size, config.mlp_size(), config.activation),
        parallel=config.parallel_residual,
        norm_eps=config.norm_eps,
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
