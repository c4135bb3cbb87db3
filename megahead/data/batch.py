"""Turns rows of tokens into a model's inputs and targets. B rows, T inputs per row, N targets of the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from megahead.config.data import DataConfig
from megahead.config.masking import MaskedInputsConfig, MaskingConfig
from megahead.data.indexed import Array, DatasetInfo
from megahead.data.samples import CounterRng, Purpose, SampleIndices


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
    """As `Batch.cu_seqlens`, of the subset alone."""

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
        return Batch(**tree_map_only(Tensor, function, vars(self)))


class RowCollator:
    """Makes batches of rows. A row's inputs and targets depend on its tokens and its sample's number alone."""

    loss_is_upper_bound: ClassVar[bool] = False
    """Whether its loss is an upper bound of the text's negative log-likelihood."""

    def batch(self, token_ids: Array, sample_indices: SampleIndices, document_starts: Array | None = None) -> Batch:
        """The batch of a `RowSource`'s rows. token_ids: int64 [B, t], negative where a row is empty. document_starts:
        bool [B, t], document starts that follow no end token."""
        raise NotImplementedError

    def num_predicted_tokens(self, info: DatasetInfo) -> int | None:
        """The number of a dataset's tokens that the loss covers; None if these are a random part."""
        return None


@dataclass(frozen=True)
class CausalCollator(RowCollator):
    """Next-token prediction for a decoder that reads whole rows, int64 [B, T+1], as they are."""

    data: DataConfig

    def batch(self, token_ids: Array, sample_indices: SampleIndices, document_starts: Array | None = None) -> Batch:
        """The target of token t is token t + 1.

        A document begins after each end token (which belongs to the document that it closes), and where
        `document_starts` (bool [B, T+1]) is true. With `isolate_documents` positions restart there. Without
        `boundary_targets` the last token of a document has no target (the next token belongs to another document).
        Negative tokens are padding: each is read as an end token, is a document of its own, has no target, and is no
        target.
        """
        padding_BT, targets = token_ids[:, :-1] < 0, token_ids[:, 1:].reshape(-1)
        inputs_BT = np.where(padding_BT, self.data.end_token, token_ids[:, :-1])
        last_token_BT = (inputs_BT == self.data.end_token) | (token_ids[:, 1:] < 0)
        if document_starts is not None:
            last_token_BT |= document_starts[:, 1:]
        no_target_BT = padding_BT if self.data.boundary_targets else last_token_BT
        target_index_N = np.flatnonzero(~no_target_BT.reshape(-1) & (targets >= 0))
        has_several = self.data.isolate_documents and bool(last_token_BT[:, :-1].any())
        return Batch(
            torch.from_numpy(inputs_BT),
            document_positions(last_token_BT) if has_several else None,
            torch.from_numpy(target_index_N),
            torch.from_numpy(targets[target_index_N]),
        )

    def num_predicted_tokens(self, info: DatasetInfo) -> int:
        return info.tokens


def document_positions(last_token_BT: Array) -> Tensor:
    """int64 [B, T]: distance of each token to the first token of its document (or of its row).

    last_token_BT: bool, whether a token is the last of its document.
    """
    column_T = np.arange(last_token_BT.shape[1])
    first_BT = np.zeros(last_token_BT.shape, np.int64)
    first_BT[:, 1:] = np.where(last_token_BT[:, :-1], column_T[1:], 0)
    return torch.from_numpy(column_T - np.maximum.accumulate(first_BT, axis=1))


# An encoder's rows: [CLS], T - 2 tokens of consecutive text (documents follow each other, each closed by its end
# token), [SEP]. These are RoBERTa's "full sentences" (Liu et al. 2019, arXiv 1907.11692), without pairs of segments. So
# every row is full, and nothing is computed for padding. If documents are isolated, [CLS] belongs to a row's first
# document, [SEP] to its last. B rows, T tokens per row, N targets of the batch.


@dataclass(frozen=True)
class EncoderRows:
    """Rows with [CLS] and [SEP], before any token is masked."""

    tokens_BT: Array
    """int64."""

    maskable_BT: Array
    """bool: tokens of the text that are not special."""

    document_ends_BT: Array
    """bool: whether a token is the last of a document that another one follows in the row."""

    positions_BT: Tensor | None
    """int64, each token's position in its document; None if every row is one document."""

    def to_batch(self, is_target_BT: Array, input_ids_BT: Array) -> Batch:
        """The batch with these targets (bool) and inputs (int64)."""
        index_N = np.flatnonzero(is_target_BT)
        return Batch(
            torch.from_numpy(input_ids_BT),
            self.positions_BT,
            torch.from_numpy(index_N),
            torch.from_numpy(self.tokens_BT.reshape(-1)[index_N]),
            max_targets_per_row=int(is_target_BT.sum(1).max(initial=0)),
        )


@dataclass(frozen=True)
class EncoderRowBuilder:
    """Adds [CLS] and [SEP] to rows of text."""

    masking: MaskingConfig
    end_token: int
    isolate_documents: bool

    def unmaskable(self) -> Sequence[int]:
        """Ids that are never masked."""
        return self.masking.unmaskable_ids(self.end_token)

    def build(self, token_ids: Array, document_starts: Array | None = None) -> EncoderRows:
        """Rows of T = t + 2 tokens from `token_ids`, int64 [B, t], negative where a row is empty.

        document_starts: bool [B, t], document starts that follow no end token.
        """
        rows, length = token_ids.shape
        tokens_BT = np.full((rows, length + 2), self.end_token, np.int64)  # the empty part is read as end tokens
        tokens_BT[:, 0] = self.masking.cls_token
        tokens_BT[:, 1:-1] = np.where(token_ids < 0, self.end_token, token_ids)
        last_B = 1 + (token_ids >= 0).sum(1)
        tokens_BT[np.arange(rows), last_B] = self.masking.sep_token
        document_ends_BT = tokens_BT == self.end_token
        if document_starts is not None:
            document_ends_BT[:, 1:length] |= document_starts[:, 1:]  # the token before a document's first
        column_T = np.arange(length + 2)
        document_ends_BT &= column_T < last_B[:, None] - 1
        last_token_BT = column_T == last_B[:, None]
        if self.isolate_documents:
            last_token_BT |= document_ends_BT
        has_several = bool((token_ids < 0).any()) or bool(last_token_BT[:, :-1].any())
        positions_BT = document_positions(last_token_BT) if has_several else None
        return EncoderRows(tokens_BT, ~np.isin(tokens_BT, self.unmaskable()), document_ends_BT, positions_BT)


@dataclass(frozen=True)
class CausalEncoderCollator(RowCollator):
    """Next-token batches of an encoder's rows, for an encoder that is trained causally at first: the target of each
    token is the next one of the text, that of [CLS] the first. A sample has the same text as in masked training."""

    row_builder: EncoderRowBuilder

    boundary_targets: bool
    """Whether a document's last token has the next document's first token as target."""

    def batch(self, token_ids: Array, sample_indices: SampleIndices, document_starts: Array | None = None) -> Batch:
        """Arguments as in `EncoderRowBuilder.build`; a full row has t targets."""
        rows = self.row_builder.build(token_ids, document_starts)
        has_target_BT = np.zeros(rows.tokens_BT.shape, bool)
        has_target_BT[:, :-2] = token_ids >= 0
        if not self.boundary_targets:
            has_target_BT &= ~rows.document_ends_BT
        batch = rows.to_batch(has_target_BT, rows.tokens_BT)
        next_ids_N = batch.input_ids_BT.reshape(-1)[batch.target_index_N + 1]
        return replace(batch, target_ids_N=next_ids_N, max_targets_per_row=None)

    def num_predicted_tokens(self, info: DatasetInfo) -> int:
        return info.tokens


@dataclass(frozen=True)
class MaskedInputCollator(RowCollator):
    """Next-token batches of a decoder that reads some mask tokens and predicts the text: mask-enhanced autoregressive
    prediction (MEAP: Zhuang et al. 2025, arXiv 2502.07490). Training is otherwise unchanged, and so is inference."""

    config: MaskedInputsConfig
    data: DataConfig
    seed: int

    def batch(self, token_ids: Array, sample_indices: SampleIndices, document_starts: Array | None = None) -> Batch:
        """As `CausalCollator.batch`, with masked inputs."""
        plain = CausalCollator(self.data).batch(token_ids, sample_indices, document_starts)
        inputs_BT = plain.input_ids_BT.numpy()
        allowed_BT = inputs_BT != self.data.end_token
        count_B = np.rint(self.config.share * allowed_BT.sum(1))
        masked_BT = CounterRng(self.seed, sample_indices).choice(Purpose.MASKED_INPUTS, allowed_BT, count_B)
        return replace(plain, input_ids_BT=torch.from_numpy(np.where(masked_BT, self.config.mask_token, inputs_BT)))
