"""A micro-batch of the pretraining module: its documents, target positions and candidates."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor, nn

from megahead.config.model import ModelConfig
from megahead.data.batch import Batch
from megahead.losses.candidates import Candidates
from megahead.models.documents import Documents, TargetPositions, TokenSubset
from megahead.models.layers import ACTIVATIONS, build_norm

CANDIDATE_MULTIPLE = 512
"""On CUDA the candidates of a candidate group are padded to a multiple of this, so that kernels have full blocks and
memory is reused."""

CANDIDATE_MULTIPLE_ON_CPU = 128
"""The same for half precision on CPUs, where compiling a product for a new shape costs more than computing it."""

DOCUMENT_MULTIPLE = 128
"""On CUDA `cu_seqlens` is padded to a multiple of this, so that blocks are compiled for one or two shapes. Empty
documents cost the kernels almost nothing."""

TARGET_MULTIPLE = 16
"""With static shapes each masked row has the same number of slots (places for targets), a multiple of this."""

_PACK_ALIGNMENT = 16
"""Bytes; a multiple of every dtype's size."""


def documents_of(batch: Batch) -> Documents:
    """The document boundaries of the batch, on its device."""
    if batch.positions_BT is not None:
        return Documents(batch.positions_BT, batch.cu_seqlens)
    rows, row_length = batch.input_ids_BT.shape
    return Documents.whole_rows(rows, row_length, batch.input_ids_BT.device)


def target_positions_of(batch: Batch) -> TargetPositions:
    """The positions of the batch with a target."""
    rows, row_length = batch.input_ids_BT.shape
    return TargetPositions(batch.target_index_N, rows, row_length, batch.max_targets_per_row)


def target_and_first_positions_of(batch: Batch) -> tuple[TargetPositions, Tensor]:
    """The positions of the targets and of the rows' first tokens (which are no targets), increasing; int64 [N + B]: the
    index of each target among them, then that of each first token."""
    (rows, row_length), index_N = batch.input_ids_BT.shape, batch.target_index_N
    index = torch.cat([index_N, torch.arange(0, rows * row_length, row_length, device=index_N.device)])
    order = index.argsort()
    most = None if batch.max_targets_per_row is None else batch.max_targets_per_row + 1
    return TargetPositions(index[order], rows, row_length, most), order.argsort()


def all_positions_of(batch: Batch) -> TargetPositions:
    """All positions of the batch."""
    ids_BT = batch.input_ids_BT
    return TargetPositions(torch.arange(ids_BT.numel(), device=ids_BT.device), *ids_BT.shape)


def token_subsets_of(batch: Batch) -> list[TokenSubset]:
    """The token subsets to which some layers are restricted, in the order of these layers."""
    (rows, row_length), subsets = batch.input_ids_BT.shape, []
    for index in batch.token_subsets:
        positions = TargetPositions(index.index_N, rows, row_length, index.max_per_row)
        subsets.append(TokenSubset(positions, index.layers, index.first_layer_attends_to_all, index.cu_seqlens))
    return subsets


def with_cu_seqlens(batch: Batch, multiple: int) -> Batch:
    """The batch with `cu_seqlens` padded to a multiple, which saves a synchronization with the GPU."""
    documents = documents_of(batch)
    token_subsets = tuple(
        index._replace(cu_seqlens=subset.select_documents(documents).padded_cu_seqlens(multiple))
        for index, subset in zip(batch.token_subsets, token_subsets_of(batch), strict=True)
    )
    is_packed = batch.positions_BT is not None  # else each row is one document
    cu_seqlens = documents.padded_cu_seqlens(multiple) if is_packed else None
    return replace(batch, cu_seqlens=cu_seqlens, token_subsets=token_subsets)


@dataclass(frozen=True)
class MicroBatch:
    """One forward-backward pass of one rank."""

    batch: Batch
    candidates: tuple[Candidates, ...]
    """One for each candidate group with samples in this batch, in the order of its targets."""

    loss_weight: float | Tensor
    """Factor of the loss summed over this micro-batch: data_ranks * accumulation_steps / the global batch's targets
    (their weights' sum). The engine averages over accumulation steps and data ranks; the result is the mean over the
    global batch's targets. A float32 [] tensor under static shapes: a captured graph has only tensor inputs."""

    auxiliary_weight: float | None = None
    """The factor for an auxiliary objective whose loss is not a mean over targets; None: `loss_weight`."""

    auxiliary_candidates: tuple[Candidates, ...] = ()
    """As `candidates`, for the own targets of an auxiliary objective."""

    buffer: Tensor | None = None
    """The bytes of all its tensors, which are views of it (see `pack`); None: they have separate memory."""

    shapes: Hashable = None
    """Key of a captured graph: this micro-batch with shapes and dtypes instead of tensors; None: prepared without
    static shapes."""

    def ids(self) -> Tensor:
        """int64: the ids of all embeddings that it looks up, inputs and candidates."""
        groups = (*self.candidates, *self.auxiliary_candidates)
        candidates = [group.ids_U for group in groups if group.ids_U is not None]
        return torch.cat([self.batch.input_ids_BT.flatten(), *candidates])

    def to(self, device: torch.device) -> MicroBatch:
        """The same micro-batch on `device`; copies from pinned memory are asynchronous."""
        if self.buffer is None:
            return self._map_tensors(lambda tensor: tensor.to(device, non_blocking=True))
        return self.with_buffer(self.buffer.to(device, non_blocking=True))

    def pack(self) -> MicroBatch:
        """The same micro-batch in one buffer, which one copy moves to a device."""
        tensors: list[Tensor] = []
        self._map_tensors(lambda tensor: tensors.append(tensor) or tensor)  # type: ignore[func-returns-value]
        padded_sizes = [-(-tensor.nbytes // _PACK_ALIGNMENT) * _PACK_ALIGNMENT for tensor in tensors]
        *starts, size = accumulate(padded_sizes, initial=0)
        buffer = torch.empty(size, dtype=torch.uint8)
        copies = []
        for start, tensor in zip(starts, tensors, strict=True):
            view = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies.append(view.copy_(tensor))
        remaining = iter(copies)
        return replace(self._map_tensors(lambda _: next(remaining)), buffer=buffer)

    def prepare_for(
        self, device: torch.device, half_precision: bool = False, static_shapes: bool = False
    ) -> MicroBatch:
        """The micro-batch on the CPU, padded for `device`; `half_precision`: for computation in half precision.

        For CUDA it is in one buffer of pinned memory, with float32 biases and `cu_seqlens`, so that the host copies
        once without blocking. With `static_shapes` the same on other devices, unpinned, and padded to shapes that
        repeat.
        """
        if device.type != "cuda" and not static_shapes:
            return self._pad_candidates(CANDIDATE_MULTIPLE_ON_CPU) if half_precision else self
        padded = self._with_static_shapes() if static_shapes else self._pad_candidates(CANDIDATE_MULTIPLE)
        padded = padded._map_candidates(Candidates.with_float32_biases)
        packed = replace(padded, batch=with_cu_seqlens(padded.batch, DOCUMENT_MULTIPLE)).pack()
        packed = packed._with_shapes() if static_shapes else packed
        assert packed.buffer is not None
        return packed if device.type != "cuda" else packed.with_buffer(packed.buffer.pin_memory())

    def with_buffer(self, buffer: Tensor) -> MicroBatch:
        """The same micro-batch as views of `buffer`, a copy of `self.buffer`."""
        by_dtype: dict[torch.dtype, Tensor] = {}

        def view(tensor: Tensor) -> Tensor:
            if tensor.dtype not in by_dtype:
                by_dtype[tensor.dtype] = buffer.view(tensor.dtype)
            return by_dtype[tensor.dtype].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

        return replace(self._map_tensors(view), buffer=buffer)

    def _map_tensors(self, function: Callable[[Tensor], Tensor]) -> MicroBatch:
        weight = function(self.loss_weight) if isinstance(self.loss_weight, Tensor) else self.loss_weight
        mapped = replace(self, batch=self.batch.map_tensors(function), loss_weight=weight)
        return mapped._map_candidates(lambda group: group.map_tensors(function))

    def _map_candidates(self, function: Callable[[Candidates], Candidates]) -> MicroBatch:
        candidates, own = (tuple(map(function, groups)) for groups in (self.candidates, self.auxiliary_candidates))
        return replace(self, candidates=candidates, auxiliary_candidates=own)

    def _pad_candidates(self, multiple: int) -> MicroBatch:
        return self._map_candidates(lambda group: group.pad_to_multiple(multiple))

    def _with_static_shapes(self) -> MicroBatch:
        """The same micro-batch with equally many candidates in all groups, a target in every slot, and the loss weight
        as a tensor."""
        most = max(0 if group.ids_U is None else len(group.ids_U) for group in self.candidates)
        padded = self._pad_candidates(max(-(-most // CANDIDATE_MULTIPLE), 1) * CANDIDATE_MULTIPLE)
        return replace(padded._fill_slots(), loss_weight=torch.tensor(self.loss_weight, dtype=torch.float32))

    def _with_shapes(self) -> MicroBatch:
        """The same micro-batch with its `shapes`."""
        shapes = self._map_tensors(lambda tensor: (tensor.shape, tensor.dtype))  # type: ignore[arg-type, return-value]
        return replace(self, shapes=replace(shapes, buffer=None))

    def _fill_slots(self) -> MicroBatch:
        """The same micro-batch with equally many targets in every row. Added targets have weight 0, and repeat the
        first one, so that their loss is finite; therefore indices no longer increase. Unchanged if all slots are full,
        or a candidate group has no target."""
        batch, (rows, row_length) = self.batch, self.batch.input_ids_BT.shape
        most = row_length if batch.max_targets_per_row is None else batch.max_targets_per_row
        slots_per_row = min(-(-most // TARGET_MULTIPLE) * TARGET_MULTIPLE, row_length)
        num_slots, sizes = rows * slots_per_row, [len(group.target_N) for group in self.candidates]
        if sum(sizes) == num_slots or not all(sizes):
            return self
        slot_N = TargetPositions(batch.target_index_N, rows, row_length, slots_per_row).slot_N
        group_slots = num_slots // len(sizes)
        groups = zip(self.candidates, slot_N.split(sizes), strict=True)
        candidates = tuple(
            replace(
                group,
                target_N=_fill(group.target_N, slot_n % group_slots, group_slots),
                weight_N=_fill_weights(group.weight_N, slot_n % group_slots, group_slots),
            )
            for group, slot_n in groups
        )
        batch = replace(
            batch,
            target_index_N=_fill(batch.target_index_N, slot_N, num_slots),
            target_ids_N=_fill(batch.target_ids_N, slot_N, num_slots),
            weight_N=_fill_weights(batch.weight_N, slot_N, num_slots),
            max_targets_per_row=None if batch.max_targets_per_row is None else slots_per_row,
        )
        return replace(self, batch=batch, candidates=candidates)


def _fill(values_N: Tensor, slot_N: Tensor, num_slots: int) -> Tensor:
    """[S]: the values in their slots, the first of them in all others."""
    return values_N[:1].expand(num_slots).index_copy(0, slot_N, values_N)


def _fill_weights(weight_N: Tensor | None, slot_N: Tensor, num_slots: int) -> Tensor:
    """float32 [S]: the weights (None: 1) in their slots, 0 in all others."""
    weight_N = torch.ones(len(slot_N)) if weight_N is None else weight_N
    return weight_N.new_zeros(num_slots).index_copy(0, slot_N, weight_N)


@dataclass(frozen=True)
class EvaluationRequest:
    """Batches to evaluate over the whole vocabulary: one forward pass of the backbone per batch, then one softmax over
    the vocabulary for all of them."""

    batches: tuple[Batch, ...]

    bias_V: Tensor | None
    """Added to the scores of all V ids: log q for a headless model's training-free head; None: no bias."""


# Parts of a vanilla head: an output matrix, a bias, and for an encoder a transform.
#
# V padded vocabulary, D features, N targets.


class OutputBias(nn.Module):
    """The bias of the logits, [V]; has no `forward`."""

    def __init__(self, padded_vocab_size: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(padded_vocab_size))


class MaskHead(nn.Module):
    """The head of a masked language model without its output matrix: dense layer, norm, and bias of the logits.

    scores = norm(gelu(dense h)) . e_v + bias_v. Headless encoders do not have this head.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, config.transform_bias)
        self.norm = build_norm(config)
        self.bias = nn.Parameter(torch.empty(config.padded_vocab_size()))

    def forward(self, outputs_ND: Tensor) -> Tensor:
        """[N, D]: the transformed outputs; the caller adds the bias to the scores."""
        transformed_ND: Tensor = self.norm(self.activation(self.dense(outputs_ND)))
        return transformed_ND
