"""ModernBERT (Warner et al. 2024, arXiv 2412.13663), an encoder for long documents, without its head.

B rows, T tokens a row, t those of them that this rank holds, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn

from megahead.config.model import ModelConfig
from megahead.distributed.group import scatter_to_group
from megahead.models.attention import Heads, SelfAttention
from megahead.models.backbone import Backbone
from megahead.models.blocks import Block
from megahead.models.documents import Documents
from megahead.models.layers import Embedding, GatedMLP, LayerNorm, Rotation, dropout, rotary_at
from megahead.models.parallel import SPLIT_HEADS, SPLIT_TOKENS, SPLIT_WEIGHTS


class ModernBert(Backbone):
    """Normed embeddings, pre-norm blocks, a final norm; rotary positions, GeGLU, no biases.

    Every third layer is global: its tokens see their whole document. In the others they see what is near them, with
    rotary positions of a smaller base. Rows are full of packed text ("unpadded"): documents take the place of padding.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        norm = partial(LayerNorm, config.hidden_size, eps=config.norm_eps, bias=False)
        self.dropout = config.hidden_dropout
        self.head_size = config.head_size()
        self.rotary_base, self.local_rotary_base = config.rotary_base, config.local_rotary_base
        self.local = [config.is_local(layer) for layer in range(config.num_layers)]
        self.window = config.local_window // 2  # to each side
        self.embedding = Embedding(config.padded_vocab_size(), config.hidden_size)
        self.embedding_norm = norm()
        self.blocks = nn.ModuleList(_block(config, layer, norm) for layer in range(config.num_layers))
        self.final_norm = norm()

    def embedded(self, rows_BTD: Tensor, documents: Documents) -> Tensor:
        """[B, t, D]: the normed rows of the table; positions are the blocks' affair."""
        x_BtD = self.embedding_norm(scatter_to_group(rows_BTD, self.sequence_group, dim=1))
        return dropout(x_BtD, self.dropout, self.sequence_group, self.training)

    def views(self, documents: Documents) -> Sequence[tuple[Rotation, Documents]]:
        """Whole documents for global blocks, what is near for local ones; each with its rotation."""
        whole = self._rotation(documents, self.rotary_base), documents
        near = self._rotation(documents, self.local_rotary_base), documents.within(self.window)
        return [near if local else whole for local in self.local]

    def normed(self, x: Tensor) -> Tensor:
        """[..., D]: by the final norm."""
        normed: Tensor = self.final_norm(x)
        return normed

    def _rotation(self, documents: Documents, base: float) -> Rotation:
        return rotary_at(documents.positions_BT, self.head_size, base)


def _block(config: ModelConfig, layer: int, norm: Callable[[], nn.Module]) -> Block:
    """The first reads what the embedding's norm has normed."""
    heads = Heads(config.num_heads, config.num_heads, config.head_size(), bias=False, output_bias=False)
    return Block(
        norm() if layer else nn.Identity(),
        SelfAttention(config.hidden_size, heads, causal=config.is_causal, dropout=config.attention_dropout),
        norm(),
        GatedMLP(config.hidden_size, config.mlp_size(), config.activation, bias=False),
        parallel=False,
        dropout=config.hidden_dropout,
    )


SHARDING = SPLIT_WEIGHTS | SPLIT_HEADS | SPLIT_TOKENS | {"embedding_norm": "norm", "blocks.*.mlp.gate": "column"}
"""How each module splits over a tensor group."""
