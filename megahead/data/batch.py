"""Turns rows of tokens into a model's inputs and targets. B rows, T inputs per row, N targets of the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from megahead.config.data import DataConfig
from megahead.data.indexed import Array, DatasetInfo


class SubsetIndex(NamedTuple):
    """A token subset: the only tokens that some layers of an encoder compute; all others skip these layers."""

    index_N: Tensor
    """int64, increasing: which of the B * T tokens, rows concatenated."""

    max_per_row: int
    """Largest number of them in a row."""

    layers: range
    """Which layers."""

    first_layer_attends_to_all: bool = False
    """Whether they attend to all tokens in the first of these layers."""

    cu_seqlens: Tensor | None = None
    """As `Batch.cu_seqlens`, for the shorter rows."""

    @staticmethod
    def from_mask(mask_BT: Array, layers: range, first_layer_attends_to_all: bool = False) -> SubsetIndex:
        """Selects the tokens where `mask_BT` is true."""
        max_per_row = int(mask_BT.sum(1).max(initial=1))
        return SubsetIndex(torch.from_numpy(np.flatnonzero(mask_BT)), max_per_row, layers, first_layer_attends_to_all)


@dataclass(frozen=True)
class Batch:
    """The inputs of B rows and their targets."""

    input_ids_BT: Tensor
    """int64."""

    positions_BT: Tensor | None
    """int64, each token's position in its document (0 at the first token); None if every row is one document."""

    target_index_N: Tensor
    """int64, increasing: which of the B * T outputs, rows concatenated, have a target."""

    target_ids_N: Tensor
    """int64: what those outputs must predict."""

    max_targets_per_row: int | None = None
    """Largest number of targets in a row, if they are few (masked rows); None if almost every output has one."""

    cu_seqlens: Tensor | None = None
    """int32: the index of each document's first token, rows concatenated, then B * T (as flash-attention's varlen
    functions take it); None: not computed."""

    token_subsets: tuple[SubsetIndex, ...] = ()
    """In the order of their layers; all other layers compute all tokens."""

    auxiliary: Any = ()
    """Inputs of an auxiliary objective: tensors in nested tuples, lists and dicts."""

    weight_N: Tensor | None = None
    """float32: weight of each target's loss; None: 1."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same batch on `device`."""
        return self.map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def total_weight(self) -> float:
        """Sum of the targets' weights."""
        return self.target_ids_N.numel() if self.weight_N is None else float(self.weight_N.sum(dtype=torch.float64))

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """The same batch with `function` applied to every tensor."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in values.items():
            if isinstance(value, Tensor):
                values[name] = function(value)
            elif isinstance(value, list | tuple | dict):
                values[name] = tree_map_only(Tensor, function, value)
        return Batch(**values)


class RowCollator:
    """Makes batches of rows. A row's inputs and targets depend on its tokens and its sample's number alone."""

    upper_bound: ClassVar[bool] = False
    """Whether its loss is an upper bound of the text's negative log-likelihood."""

    def batch(self, text: Array, sample_indices: Sequence[int] | Array, document_starts: Array | None = None) -> Batch:
        """The batch of a `RowSource`'s rows, int64 [B, t], negative where a row is empty, and its `document_starts`,
        bool [B, t]: where documents begin other than after end tokens."""
        raise NotImplementedError

    def num_predicted_tokens(self, info: DatasetInfo) -> int | None:
        """The number of a dataset's tokens that the loss covers; None if these are a random part."""
        return None


@dataclass(frozen=True)
class CausalCollator(RowCollator):
    """Next-token prediction for a decoder that reads whole rows, int64 [B, T+1], as they are."""

    data: DataConfig

    def batch(self, text: Array, sample_indices: Sequence[int] | Array, document_starts: Array | None = None) -> Batch:
        data = self.data
        return causal_batch(
            text,
            document_starts,
            end_token=data.end_token,
            isolate_documents=data.isolate_documents,
            boundary_targets=data.boundary_targets,
        )

    def num_predicted_tokens(self, info: DatasetInfo) -> int:
        return info.tokens


def causal_batch(
    rows: Array,
    document_starts: Array | None = None,
    *,
    end_token: int,
    isolate_documents: bool,
    boundary_targets: bool,
) -> Batch:
    """Next-token prediction over `rows`, int64 [B, T+1]: the target of token t is token t + 1.

    A document begins after each end token (which belongs to the document that it closes), and where `document_starts`
    (bool [B, T+1]) is true. With `isolate_documents` positions restart there. Without `boundary_targets` the last token
    of a document has no target (the next token belongs to another document). Negative tokens are padding: they are read
    as end tokens, each as a document of its own, have no targets and are no targets.
    """
    inputs_BT = np.ascontiguousarray(rows[:, :-1])
    targets = rows[:, 1:].reshape(-1)
    padding_BT = inputs_BT < 0
    if has_padding := bool(padding_BT.any()) or bool((targets < 0).any()):
        inputs_BT = np.where(padding_BT, end_token, inputs_BT)
    last_token_BT = (inputs_BT == end_token) | (rows[:, 1:] < 0)
    if document_starts is not None:
        last_token_BT |= document_starts[:, 1:]
    if boundary_targets and not has_padding:
        target_index_N = np.arange(inputs_BT.size)
    else:
        no_target_BT = last_token_BT if not boundary_targets else padding_BT
        target_index_N = np.flatnonzero(~no_target_BT.reshape(-1) & (targets >= 0))
    positions_BT = document_positions(last_token_BT) if isolate_documents and last_token_BT[:, :-1].any() else None
    return Batch(
        torch.from_numpy(inputs_BT),
        None if positions_BT is None else torch.from_numpy(positions_BT),
        torch.from_numpy(target_index_N),
        torch.from_numpy(targets[target_index_N]),
    )


def document_positions(last_token_BT: Array) -> Array:
    """int64 [B, T]: distance of each token to the first token of its document (or of its row).

    last_token_BT: bool, whether a token is the last of its document.
    """
    column_T = np.arange(last_token_BT.shape[1])
    first_BT = np.zeros(last_token_BT.shape, np.int64)
    first_BT[:, 1:] = np.where(last_token_BT[:, :-1], column_T[1:], 0)
    return column_T - np.maximum.accumulate(first_BT, axis=1)
