"""Gemma 3, a decoder with local and global layers, and norms around each sublayer.

B rows, T tokens per row, t of them on this rank, D hidden size, N targets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from megahead.config.model import ModelConfig
from megahead.models.backbone import Decoder, build_attention, build_mlp
from megahead.models.blocks import Block
from megahead.models.documents import Documents, TargetPositions
from megahead.models.layers import RMSNorm, Rotation, rotary_tables


class SandwichBlock(Block):
    """A block with norms before and after each sublayer: `y = x + norm'(attention(norm x))`, then the same with the MLP
    and norms of its own."""

    def __init__(self, config: ModelConfig, norm: Callable[[], nn.Module]) -> None:
        attention, mlp = build_attention(config), build_mlp(config)
        super().__init__(norm(), attention, norm(), mlp, parallel=False, dropout=config.hidden_dropout)
        self.attention_output_norm = norm()
        self.mlp_output_norm = norm()

    def forward(
        self, x_BTD: Tensor, rotation: Rotation | None, documents: Documents, targets: TargetPositions | None = None
    ) -> Tensor:
        """[B, T, D], or [N, D] with `targets`: as `Block`."""
        attended = self.attention(self.attention_norm(x_BTD), rotation, documents, targets)
        x = x_BTD if targets is None else targets.select(x_BTD)
        x = x + self._dropout(self.attention_output_norm(attended))
        return x + self._dropout(self.mlp_output_norm(self.mlp(self.mlp_norm(x))))


class Gemma3(Decoder):
    """The text model of Gemma 3 (Gemma Team 2025, arXiv 2503.19786) without its head.

    Token embeddings times sqrt(D), sandwich blocks with RMS norms (whose weights are around 0), norms of queries and
    keys, GeGLU, rotary positions. Every sixth layer is global; the others are local: a token attends to a window that
    ends with it, with rotary positions of a smaller base. Outputs are scored against embeddings that are not scaled.
    """

    def __init__(self, config: ModelConfig) -> None:
        norm = partial(RMSNorm, config.hidden_size, eps=config.norm_eps, zero_centered=True)
        super().__init__(config, partial(SandwichBlock, config, norm), norm)
        self.embedding_scale = math.sqrt(config.hidden_size)
        self.local_rotary_base = config.local_rotary_base
        self.is_local = [config.is_local(layer) for layer in range(config.num_layers)]
        self.window = config.window_radius()

    def initial_hidden(self, inputs_BTD: Tensor, documents: Documents) -> Tensor:
        """[B, t, D]: the scaled token embeddings. The scale is rounded to their dtype, as in the published model."""
        scale = torch.tensor(self.embedding_scale, dtype=inputs_BTD.dtype)
        return super().initial_hidden(inputs_BTD * scale, documents)

    def block_arguments(self, documents: Documents) -> Sequence[tuple[Rotation | None, Documents]]:
        """Each block's rotation, and the documents, for local blocks with the window."""
        global_arguments = super().block_arguments(documents)[0]
        local_rotation = rotary_tables(documents.positions_BT, self.rotary_dims, self.local_rotary_base)
        local_arguments = local_rotation, documents.with_window(self.window)
        return [local_arguments if is_local else global_arguments for is_local in self.is_local]
