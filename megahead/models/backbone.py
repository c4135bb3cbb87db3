"""A backbone: token embeddings in, hidden states after the final norm out; what all decoders and all encoders share.

B rows, T tokens a row, t those of them that this rank holds, D hidden size, N targets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import ClassVar

from torch import Tensor, nn

from megahead.config.model import ModelConfig, RotaryScalingConfig
from megahead.distributed.group import Group, gather_from_group, scatter_to_group
from megahead.models.attention_backends import Attend
from megahead.models.blocks import Block, CompiledBlocks, Recompute, SelfAttention, checkpointed
from megahead.models.documents import Documents, TargetPositions, TokenSubset
from megahead.models.layers import Embedding, Rotation, Scaling, rotary_at, scaled_as_llama3, scaled_linearly


class Backbone(nn.Module, ABC):
    """An embedding table and blocks over its rows: tokens to hidden states, without a head. A family defines what its
    first block reads, the further inputs of each block, and what follows the last one.

    Looking up and encoding are apart, so that one lookup can serve the input tokens and the candidates of a loss.
    """

    embedding: nn.Embedding
    """[padded vocabulary, D]; also what outputs are scored against."""

    blocks: nn.ModuleList

    recompute_blocks: Recompute = False
    """True: keep only each block's input for the backward pass, and compute the block again there: a third more time
    for memory of L x B x T x D instead of about 17 times that; "selective": 11 times that, for little more time."""

    compiled: CompiledBlocks | None = None
    """Calls blocks compiled; None: they run as they are."""

    sequence_group: Group = Group()
    """Ranks that split each row's tokens among them inside `encode` (sequence parallelism)."""

    last_block_at_targets: ClassVar[bool] = True
    """Whether the last block computes targets alone where they are few."""

    def embed(self, ids: Tensor) -> Tensor:
        """[..., D]: the table's rows of `ids`, of any shape."""
        rows: Tensor = self.embedding(ids)
        return rows

    def embedding_blocks(self, until: int) -> Iterator[Tensor] | None:
        """The table's first `until` rows in blocks [b, D], where no rank has all of it; else None. Collective."""
        blocks: Callable[[int], Iterator[Tensor]] | None = getattr(self.embedding, "weight_blocks", None)
        return None if blocks is None else blocks(until)

    def use_attention(self, attend: Attend) -> None:
        """Has every layer compute attention by `attend`, which must serve this backbone's device and precision."""
        for layer in self.modules():
            if isinstance(layer, SelfAttention):
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
    def embedded(self, rows_BTD: Tensor, documents: Documents) -> Tensor:
        """[B, t, D]: what the first block reads."""

    @abstractmethod
    def block_inputs(self, documents: Documents) -> Sequence[tuple[object, ...]]:
        """For each block, what it is called with beside its input."""

    def normed(self, x: Tensor) -> Tensor:
        """The last block's output after a norm, where there is one."""
        return x

    def encode(self, rows_BTD: Tensor, documents: Documents) -> Tensor:
        """[B, T, D]: hidden states after the final norm; a token sees its own document alone."""
        x_BtD = self._run_blocks(self.blocks, self.block_inputs(documents), self.embedded(rows_BTD, documents))
        return gather_from_group(self.normed(x_BtD), self.sequence_group, dim=1)

    def encode_at(
        self, rows_BTD: Tensor, documents: Documents, targets: TargetPositions, subsets: Sequence[TokenSubset] = ()
    ) -> Tensor:
        """[N, D]: the same at `targets`; where these are few, an encoder's last block computes them alone.

        Equal to `encode` at these positions; dropout draws other numbers. Ranks that share each row's tokens compute
        all of them. `subsets`: what some layers before the last one compute alone, in the order of these layers.
        """
        alone = self.last_block_at_targets and targets.are_few and self.sequence_group.size == 1
        if not subsets and not alone:
            return targets.take(self.encode(rows_BTD, documents))
        x_BTD, inputs, done, last = (
            self.embedded(rows_BTD, documents),
            self.block_inputs(documents),
            0,
            len(self.blocks) - 1,
        )
        for part in subsets:
            before = slice(done, part.layers.start)
            x_BTD = self._run_blocks(self.blocks[before], inputs[before], x_BTD)
            x_BTD = part.merge(self._run_subset(part, x_BTD, documents), x_BTD)
            done = part.layers.stop
        x_BTD = self._run_blocks(self.blocks[done:last], inputs[done:last], x_BTD)
        if not targets.are_few:
            return self.normed(targets.take(self.run_block(self.blocks[last], x_BTD, *inputs[last])))
        return self.normed(self.run_block(self.blocks[last], x_BTD, *inputs[last], targets, static_shapes=False))

    def forward(self, input_ids_BT: Tensor, documents: Documents | None = None) -> Tensor:
        """[B, T, D]: hidden states of `input_ids_BT`; without `documents` each row is one document."""
        if documents is None:
            rows, row_length = input_ids_BT.shape
            documents = Documents.whole_rows(rows, row_length, input_ids_BT.device)
        return self.encode(self.embed(input_ids_BT), documents)

    def _run_subset(self, part: TokenSubset, x_BTD: Tensor, documents: Documents) -> Tensor:
        """[B, K, D]: what the layers of `part` make of its tokens."""
        first, stop = part.layers.start, part.layers.stop
        if part.first_layer_sees_all:
            view = self.block_inputs(documents)[first]
            kept_ND = self.run_block(self.blocks[first], x_BTD, *view, part.kept, static_shapes=False)
            x_BKD, first = part.kept.spread(kept_ND), first + 1
        else:
            x_BKD = part.of(x_BTD)
        inputs = self.block_inputs(part.documents(documents))
        return self._run_blocks(self.blocks[first:stop], inputs[first:stop], x_BKD, static_shapes=False)

    def _run_blocks(
        self,
        blocks: Iterable[nn.Module],
        inputs: Sequence[tuple[object, ...]],
        x_BtD: Tensor,
        static_shapes: bool = True,
    ) -> Tensor:
        """[B, t, D]: the last of the blocks' outputs."""
        for block, view in zip(blocks, inputs, strict=True):
            x_BtD = self.run_block(block, x_BtD, *view, static_shapes=static_shapes)
        return x_BtD


class Decoder(Backbone):
    """Embedding, blocks, final norm; parameters only, nothing is kept in buffers."""

    last_block_at_targets = False  # its targets are about all tokens

    def __init__(self, config: ModelConfig, block: Callable[[], Block], norm: Callable[[], nn.Module]) -> None:
        """`block` makes each of the blocks, `norm` the last norm."""
        super().__init__()
        self.rotary_dims = config.rotary_dims()
        self.rotary_base = config.rotary_base
        self.rotary_scaling = _scaling(config.rotary_scaling)
        self.embedding = Embedding(config.padded_vocab_size(), config.hidden_size)
        self.blocks = nn.ModuleList(block() for _ in range(config.num_layers))
        self.final_norm = norm()

    def embedded(self, rows_BTD: Tensor, documents: Documents) -> Tensor:
        """[B, t, D]: the rows of the table."""
        return scatter_to_group(rows_BTD, self.sequence_group, dim=1)

    def block_inputs(self, documents: Documents) -> Sequence[tuple[Rotation, Documents]]:
        """The same for each block."""
        rotation = rotary_at(documents.positions_BT, self.rotary_dims, self.rotary_base, self.rotary_scaling)
        return [(rotation, documents)] * len(self.blocks)

    def normed(self, x: Tensor) -> Tensor:
        """[..., D]: by the final norm."""
        normed: Tensor = self.final_norm(x)
        return normed


def _scaling(settings: RotaryScalingConfig | None) -> Scaling | None:
    if settings is None:
        return None
    if settings.kind == "linear":
        return partial(scaled_linearly, factor=settings.factor)
    low, high = settings.low_frequency_factor, settings.high_frequency_factor
    return partial(scaled_as_llama3, factor=settings.factor, low=low, high=high, positions=settings.original_positions)
