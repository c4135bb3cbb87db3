"""GPT-2, a decoder with learned positions.

B rows, T tokens per row, t of them on this rank, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from megahead.config.model import ModelConfig
from megahead.distributed.group import scatter_to_group
from megahead.models.backbone import Decoder, build_block
from megahead.models.documents import Documents
from megahead.models.layers import Embedding, LayerNorm, dropout


class GPT2(Decoder):
    """GPT-2 (Radford et al. 2019) without its head: the sum of token and position embeddings, pre-norm blocks with
    layer norms and biases, a final norm. Positions begin at 0 with each document."""

    def __init__(self, config: ModelConfig) -> None:
        norm = partial(LayerNorm, config.hidden_size, eps=config.norm_eps)
        super().__init__(config, partial(build_block, config, norm), norm)
        self.dropout = config.hidden_dropout
        self.positions = Embedding(config.max_positions, config.hidden_size)

    def initial_hidden(self, inputs_BTD: Tensor, documents: Documents) -> Tensor:
        """[B, t, D]: the sum of token and position embeddings."""
        x_BTD = inputs_BTD + self.positions(documents.positions_BT)
        x_BtD = scatter_to_group(x_BTD, self.sequence_group, dim=1)
        return dropout(x_BtD, self.dropout, self.sequence_group, self.training)

    def block_arguments(self, documents: Documents) -> Sequence[tuple[None, Documents]]:
        """The same arguments for each block, without a rotation."""
        return [(None, documents)] * len(self.blocks)
