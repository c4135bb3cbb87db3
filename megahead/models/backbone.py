"""The backbone, from token embeddings to hidden states after the final norm: the common parts of all families.

B rows, T tokens per row, t of them on this rank, K slots per row of a token subset, D hidden size, N targets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import ClassVar

from torch import Tensor, nn

from megahead.config.model import ModelConfig
from megahead.distributed.group import Group, gather_from_group, scatter_to_group
from megahead.models.blocks import Block, CompiledBlocks, Recompute, checkpoint_block
from megahead.models.documents import Documents, TargetPositions, TokenSubset
from megahead.models.layers import Embedding, Rotation, build_norm, rotary_tables


class Backbone(nn.Module, ABC):
    """An embedding table and blocks: maps tokens to hidden states, without a head. A family defines the first block's
    input, the further arguments of each block, and the final norm.

    Lookup and encoding are separate methods, so that one lookup serves the input tokens and the candidates of a loss.
    """

    embedding: nn.Embedding
    """[padded vocabulary, D]; outputs are scored against its rows."""

    blocks: nn.ModuleList

    recompute_blocks: Recompute = False
    """True: save only each of the L blocks' inputs (L x B x T x D numbers), and recompute the block in the backward
    pass, which takes a third more time. False: save about 17 times as many. "selective": 11 times as many, for little
    more time."""

    compiled: CompiledBlocks | None = None
    """Runs blocks compiled; None: eagerly."""

    sequence_group: Group = Group()
    """Ranks that split each row's tokens inside `encode` (sequence parallelism)."""

    has_target_only_last_block: ClassVar[bool] = True
    """Whether the last block computes only targets where they are sparse."""

    def embed(self, ids: Tensor) -> Tensor:
        """[..., D]: the embeddings of `ids`, of any shape."""
        rows: Tensor = self.embedding(ids)
        return rows

    def embedding_blocks(self, num_rows: int) -> Iterator[Tensor] | None:
        """The table's first `num_rows` rows in blocks [b, D] if the table is sharded; else None. Collective."""
        blocks: Callable[[int], Iterator[Tensor]] | None = getattr(self.embedding, "weight_blocks", None)
        return None if blocks is None else blocks(num_rows)

    def run_block(self, block: nn.Module, *inputs: object, static_shapes: bool = True) -> Tensor:
        """`block(*inputs)`, recomputed in the backward pass if `recompute_blocks`, with the same dropout masks.

        `static_shapes`: whether shapes are equal in all training batches, so that compiling for them pays.
        """
        compiled = self.compiled if static_shapes and self.training else None
        call = block if compiled is None else partial(compiled, block)
        if self.recompute_blocks and self.training:
            return checkpoint_block(call, *inputs, selective=self.recompute_blocks == "selective")
        output: Tensor = call(*inputs)
        return output

    @abstractmethod
    def initial_hidden(self, inputs_BTD: Tensor, documents: Documents) -> Tensor:
        """[B, t, D]: the input of the first block."""

    @abstractmethod
    def block_arguments(self, documents: Documents) -> Sequence[tuple[object, ...]]:
        """Each block's arguments after its input."""

    def apply_final_norm(self, x: Tensor) -> Tensor:
        """The last block's output after the final norm, if there is one."""
        return x

    def encode(self, inputs_BTD: Tensor, documents: Documents) -> Tensor:
        """[B, T, D]: hidden states after the final norm; a token attends only to its own document."""
        hidden_BtD = self.initial_hidden(inputs_BTD, documents)
        x_BtD = self._run_blocks(self.blocks, self.block_arguments(documents), hidden_BtD)
        return gather_from_group(self.apply_final_norm(x_BtD), self.sequence_group, dim=1)

    def encode_at(
        self, inputs_BTD: Tensor, documents: Documents, targets: TargetPositions, subsets: Sequence[TokenSubset] = ()
    ) -> Tensor:
        """[N, D]: the hidden states of `targets`; where these are sparse, an encoder's last block computes only them.

        Equal to `encode` at these positions, except for dropout masks. With sequence parallelism all positions are
        computed. `subsets`: in layer order, the tokens to which layers before the last are restricted.
        """
        targets_only = self.has_target_only_last_block and targets.are_sparse and self.sequence_group.size == 1
        if not subsets and not targets_only:
            return targets.select(self.encode(inputs_BTD, documents))
        x_BTD, arguments = self.initial_hidden(inputs_BTD, documents), self.block_arguments(documents)
        start, last = 0, len(self.blocks) - 1
        for subset in subsets:
            full_layers = slice(start, subset.layers.start)
            x_BTD = self._run_blocks(self.blocks[full_layers], arguments[full_layers], x_BTD)
            x_BTD = subset.merge(self._run_subset(subset, x_BTD, documents), x_BTD)
            start = subset.layers.stop
        x_BTD = self._run_blocks(self.blocks[start:last], arguments[start:last], x_BTD)
        if targets.are_sparse:
            x_ND = self.run_block(self.blocks[last], x_BTD, *arguments[last], targets, static_shapes=False)
        else:
            x_ND = targets.select(self.run_block(self.blocks[last], x_BTD, *arguments[last]))
        return self.apply_final_norm(x_ND)

    def forward(self, input_ids_BT: Tensor, documents: Documents | None = None) -> Tensor:
        """[B, T, D]: hidden states of `input_ids_BT`; without `documents` each row is one document."""
        if documents is None:
            rows, row_length = input_ids_BT.shape
            documents = Documents.whole_rows(rows, row_length, input_ids_BT.device)
        return self.encode(self.embed(input_ids_BT), documents)

    def _run_subset(self, subset: TokenSubset, x_BTD: Tensor, documents: Documents) -> Tensor:
        """[B, K, D]: the subset's tokens after its layers."""
        first, stop = subset.layers.start, subset.layers.stop
        if subset.first_layer_attends_to_all:
            arguments = self.block_arguments(documents)[first]
            x_ND = self.run_block(self.blocks[first], x_BTD, *arguments, subset.positions, static_shapes=False)
            x_BKD, first = subset.positions.pad(x_ND), first + 1
        else:
            x_BKD = subset.select(x_BTD)
        subset_arguments = self.block_arguments(subset.select_documents(documents))
        return self._run_blocks(self.blocks[first:stop], subset_arguments[first:stop], x_BKD, static_shapes=False)

    def _run_blocks(
        self,
        blocks: Iterable[nn.Module],
        arguments: Sequence[tuple[object, ...]],
        x_BtD: Tensor,
        static_shapes: bool = True,
    ) -> Tensor:
        """[B, t, D]: the output of the last block."""
        for block, block_arguments in zip(blocks, arguments, strict=True):
            x_BtD = self.run_block(block, x_BtD, *block_arguments, static_shapes=static_shapes)
        return x_BtD


class PreNormBackbone(Backbone):
    """Embedding, pre-norm blocks with rotary positions, a final norm: the decoders, and ModernBERT. Layers are global
    or local: then a token attends to a window, and rotary positions have a base of their own. Has no buffers."""

    has_embedding_norm: ClassVar[bool] = False
    """Whether token embeddings are normed, so that the first block has no attention norm."""

    has_target_only_last_block = False  # in decoders nearly all tokens have a target

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dropout = config.hidden_dropout
        self.rotary_dims, self.rotary_scaling = config.rotary_dims(), config.rotary_scaling
        self.rotary_base, self.local_rotary_base = config.rotary_base, config.local_rotary_base
        self.is_local = [config.is_local(layer) for layer in range(config.num_layers)]
        self.window = config.window_radius()
        self.embedding = Embedding(config.padded_vocab_size(), config.hidden_size)
        if self.has_embedding_norm:
            self.embedding_norm = build_norm(config)
        self.blocks = nn.ModuleList(self.build_block(config, layer) for layer in range(config.num_layers))
        self.final_norm = build_norm(config)

    def build_block(self, config: ModelConfig, layer: int) -> nn.Module:
        """The block of a layer."""
        return Block(config, has_normed_input=self.has_embedding_norm and layer == 0)

    def initial_hidden(self, inputs_BTD: Tensor, documents: Documents) -> Tensor:
        """[B, t, D]: the token embeddings."""
        return scatter_to_group(inputs_BTD, self.sequence_group, dim=1)

    def block_arguments(self, documents: Documents) -> Sequence[tuple[Rotation | None, Documents]]:
        """Each block's rotation, and the documents, for local blocks with the window."""
        positions, dims = documents.positions_BT, self.rotary_dims
        global_arguments = rotary_tables(positions, dims, self.rotary_base, self.rotary_scaling), documents
        if not any(self.is_local):
            return [global_arguments] * len(self.blocks)
        local_arguments = rotary_tables(positions, dims, self.local_rotary_base), documents.with_window(self.window)
        return [local_arguments if is_local else global_arguments for is_local in self.is_local]

    def apply_final_norm(self, x: Tensor) -> Tensor:
        """[..., D]: `x` after the final norm."""
        output: Tensor = self.final_norm(x)
        return output
