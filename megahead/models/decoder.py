"""What all decoders share: an embedding, pre-norm blocks with rotary positions, a final norm.

B rows, T tokens a row, t those of them that this rank holds, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from megahead.config import ModelConfig, RotaryScalingConfig
from megahead.distributed import gather_from_group, scatter_to_group
from megahead.models.backbone import Backbone
from megahead.nn import Block, Documents, Embedding, Scaling, rotary_at, scaled_as_llama3, scaled_linearly


class Decoder(Backbone):
    """Embedding, blocks, final norm; parameters only, nothing is kept in buffers."""

    def __init__(self, config: ModelConfig, block: Callable[[], Block], norm: Callable[[], nn.Module]) -> None:
        """`block` makes each of the blocks, `norm` the last norm."""
        super().__init__()
        self.rotary_dims = config.rotary_dims()
        self.rotary_base = config.rotary_base
        self.rotary_scaling = _scaling(config.rotary_scaling)
        self.embedding = Embedding(config.padded_vocab_size(), config.hidden_size)
        self.blocks = nn.ModuleList(block() for _ in range(config.num_layers))
        self.final_norm = norm()

    def encode(self, rows_BTD: Tensor, documents: Documents) -> Tensor:
        """[B, T, D]: hidden states after the final norm; see `Backbone.encode`."""
        rotation = rotary_at(documents.positions_BT, self.rotary_dims, self.rotary_base, self.rotary_scaling)
        x_BtD = scatter_to_group(rows_BTD, self.sequence_group, dim=1)
        for block in self.blocks:
            x_BtD = self.run_block(block, x_BtD, rotation, documents)
        return gather_from_group(self.final_norm(x_BtD), self.sequence_group, dim=1)


def _scaling(asked: RotaryScalingConfig | None) -> Scaling | None:
    if asked is None:
        return None
    if asked.kind == "linear":
        return partial(scaled_linearly, factor=asked.factor)
    low, high = asked.low_frequency_factor, asked.high_frequency_factor
    return partial(scaled_as_llama3, factor=asked.factor, low=low, high=high, positions=asked.original_positions)
