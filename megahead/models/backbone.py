"""What every backbone offers to objectives, evaluation and export."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial

from torch import Tensor, nn

from megahead.distributed import Group
from megahead.models.compilation import CompiledBlocks
from megahead.nn import Attend, BidirectionalSelfAttention, CausalSelfAttention
from megahead.nn.activation_checkpointing import Recompute, checkpointed


class Backbone(nn.Module, ABC):
    """An embedding table and an encoder over its rows: tokens to hidden states, without a head.

    Looking up and encoding are apart, so that one lookup can serve the input tokens and the candidates of a loss.
    """

    embedding: nn.Embedding
    """[padded vocabulary, D]; also what outputs are scored against."""

    recompute_blocks: Recompute = False
    """True: keep only each block's input for the backward pass, and compute the block again there: a third more time
    for memory of L x B x T x D instead of about 17 times that; "selective": 11 times that, for little more time."""

    compiled: CompiledBlocks | None = None
    """Through which blocks are called, where they are to be compiled."""

    tokens: Group = Group()
    """Ranks that share out the tokens of each row between `encode`'s beginning and end; one rank has them all."""

    def embed(self, ids: Tensor) -> Tensor:
        """[..., D]: the table's rows of `ids`, of any shape."""
        rows: Tensor = self.embedding(ids)
        return rows

    def use_attention(self, attend: Attend) -> None:
        """Has every layer compute attention by `attend`, which must serve this backbone's device and precision."""
        for layer in self.modules():
            if isinstance(layer, CausalSelfAttention | BidirectionalSelfAttention):
                layer.attend = attend

    def run_block(self, block: nn.Module, *inputs: object, steady: bool = True) -> Tensor:
        """`block(*inputs)`, recomputed in the backward pass where `recompute_blocks`; dropout draws the same again.

        `steady`: shapes are the same in every batch, so that compiling for them pays.
        """
        call = block if self.compiled is None or not steady else partial(self.compiled, block)
        if self.recompute_blocks and self.training:
            return checkpointed(call, *inputs, selective=self.recompute_blocks == "selective")
        output: Tensor = call(*inputs)
        return output

    @abstractmethod
    def encode(self, rows_BTD: Tensor, positions_BT: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """[B, T, D]: hidden states after the final norm.

        `positions_BT` restart at 0 with each document of a row, and documents do not see each other; None: each row
        is one document. `cu_seqlens`: of the documents, as `Batch` has them; else looked for where they are needed.
        """

    def encode_at(
        self,
        rows_BTD: Tensor,
        positions_BT: Tensor | None,
        index_N: Tensor,
        max_targets_per_row: int | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """[N, D]: `encode` at the flattened positions `index_N` (increasing), of which a row has at most `max_targets_per_row`.

        An encoder saves the last block's work elsewhere; None: about every position is asked for.
        """
        return self.encode(rows_BTD, positions_BT, cu_seqlens).flatten(0, 1).index_select(0, index_N)

    def forward(self, input_ids_BT: Tensor, positions_BT: Tensor | None = None) -> Tensor:
        """[B, T, D]: hidden states of `input_ids_BT`."""
        return self.encode(self.embed(input_ids_BT), positions_BT)
