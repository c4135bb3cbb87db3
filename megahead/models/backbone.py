"""What every backbone offers to objectives, evaluation and export."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

from megahead.distributed import Group
from megahead.models.compilation import CompiledBlocks
from megahead.nn import Attend, CausalSelfAttention, Documents, SelfAttention, ShorterRows, TargetPositions
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
    """Calls blocks compiled; None: they run as they are."""

    sequence_group: Group = Group()
    """Ranks that split each row's tokens among them inside `encode` (sequence parallelism)."""

    def embed(self, ids: Tensor) -> Tensor:
        """[..., D]: the table's rows of `ids`, of any shape."""
        rows: Tensor = self.embedding(ids)
        return rows

    def use_attention(self, attend: Attend) -> None:
        """Has every layer compute attention by `attend`, which must serve this backbone's device and precision."""
        for layer in self.modules():
            if isinstance(layer, CausalSelfAttention | SelfAttention):
                layer.attend = attend

    def run_block(self, block: nn.Module, *inputs: object, static_shapes: bool = True) -> Tensor:
        """`block(*inputs)`, recomputed in the backward pass where `recompute_blocks`; dropout draws the same again.

        `static_shapes`: the same in every batch of training, so that compiling for them pays; not in evaluation.
        """
        compiled = self.compiled if static_shapes and self.training else None
        call = block if compiled is None else partial(compiled, block)
        if self.recompute_blocks and self.training:
            return checkpointed(call, *inputs, selective=self.recompute_blocks == "selective")
        output: Tensor = call(*inputs)
        return output

    @abstractmethod
    def encode(self, rows_BTD: Tensor, documents: Documents) -> Tensor:
        """[B, T, D]: hidden states after the final norm; a token sees its own document alone."""

    def encode_at(
        self,
        rows_BTD: Tensor,
        documents: Documents,
        targets: TargetPositions,
        shorter: Sequence[ShorterRows] = (),
    ) -> Tensor:
        """[N, D]: `encode` at `targets`. Where these are few, an encoder computes its last block for them alone.

        shorter: where some layers of an encoder compute a part of the tokens alone; a decoder has none."""
        return targets.take(self.encode(rows_BTD, documents))

    def forward(self, input_ids_BT: Tensor, documents: Documents | None = None) -> Tensor:
        """[B, T, D]: hidden states of `input_ids_BT`; without `documents` each row is one document."""
        if documents is None:
            rows, row_length = input_ids_BT.shape
            documents = Documents.whole_rows(rows, row_length, input_ids_BT.device)
        return self.encode(self.embed(input_ids_BT), documents)
