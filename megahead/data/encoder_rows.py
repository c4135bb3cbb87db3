"""Encoder rows with special tokens, next-token batches of them, and decoder batches with masked inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from megahead.config.data import DataConfig
from megahead.config.masking import MaskedInputsConfig, MaskingConfig
from megahead.data.batch import Batch, CausalCollator, RowCollator, document_positions
from megahead.data.indexed import Array
from megahead.data.samples import CounterRng, Purpose

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

    ends_BT: Array
    """bool: the last token of each document, where another follows it in the row's text."""

    positions_BT: Array | None
    """int64, each token's position in its document; None if every row is one document."""

    def to_batch(self, is_target_BT: Array, input_ids_BT: Array) -> Batch:
        """The batch with these targets (bool) and inputs (int64)."""
        index_N = np.flatnonzero(is_target_BT)
        return Batch(
            torch.from_numpy(input_ids_BT),
            None if self.positions_BT is None else torch.from_numpy(self.positions_BT),
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

    def build(self, text: Array, document_starts: Array | None = None) -> EncoderRows:
        """Rows of T = t + 2 tokens from `text`, int64 [B, t], negative where a row is empty.

        document_starts: bool [B, t], where documents begin other than after end tokens.
        """
        rows, length = text.shape
        tokens_BT = np.full((rows, length + 2), self.end_token, np.int64)  # the empty part is read as end tokens
        tokens_BT[:, 0] = self.masking.cls_token
        tokens_BT[:, 1:-1] = np.where(text < 0, self.end_token, text)
        last_B = 1 + (text >= 0).sum(1)
        tokens_BT[np.arange(rows), last_B] = self.masking.sep_token
        ends_BT = tokens_BT == self.end_token
        if document_starts is not None:
            ends_BT[:, 1:length] |= document_starts[:, 1:]  # the token before a document's first
        column_T = np.arange(length + 2)
        ends_BT &= column_T < last_B[:, None]
        last_token_BT = column_T == last_B[:, None]
        if self.isolate_documents:
            last_token_BT |= ends_BT
        has_several = bool((text < 0).any()) or bool(last_token_BT[:, :-1].any())
        positions_BT = document_positions(last_token_BT) if has_several else None
        return EncoderRows(tokens_BT, ~np.isin(tokens_BT, self.unmaskable()), ends_BT, positions_BT)


@dataclass(frozen=True)
class NextTokenCollator(RowCollator):
    """Next-token batches of an encoder's rows, for an encoder that is trained causally at first: the target of each
    token is the next one of the text, that of [CLS] the first. A sample has the same text as when it is masked."""

    row_builder: EncoderRowBuilder

    boundary_targets: bool
    """Whether the first token of a document is the target of the last token of the document before it."""

    def batch(self, text: Array, sample_indices: Sequence[int] | Array, document_starts: Array | None = None) -> Batch:
        """Arguments as in `EncoderRowBuilder.build`; a full row has t targets."""
        rows = self.row_builder.build(text, document_starts)
        has_target_BT = np.zeros(rows.tokens_BT.shape, bool)
        has_target_BT[:, :-2] = text >= 0
        if not self.boundary_targets:
            has_target_BT &= ~rows.ends_BT
        index_N = np.flatnonzero(has_target_BT)
        return Batch(
            torch.from_numpy(rows.tokens_BT),
            None if rows.positions_BT is None else torch.from_numpy(rows.positions_BT),
            torch.from_numpy(index_N),
            torch.from_numpy(rows.tokens_BT.reshape(-1)[index_N + 1]),
        )


@dataclass(frozen=True)
class MaskedInputCollator(RowCollator):
    """Next-token batches of a decoder that reads some mask tokens and predicts the text: mask-enhanced autoregressive
    prediction (MEAP: Zhuang et al. 2025, arXiv 2502.07490). Training is otherwise unchanged, and so is inference."""

    config: MaskedInputsConfig
    data: DataConfig
    seed: int

    def batch(self, text: Array, sample_indices: Sequence[int] | Array, document_starts: Array | None = None) -> Batch:
        """As `CausalCollator.batch`, with masked inputs."""
        plain = CausalCollator(self.data).batch(text, sample_indices, document_starts)
        inputs_BT = plain.input_ids_BT.numpy()
        allowed_BT = inputs_BT != self.data.end_token
        count_B = np.rint(self.config.share * allowed_BT.sum(1))
        masked_BT = CounterRng(self.seed, sample_indices).choice(Purpose.MASKED_INPUTS, allowed_BT, count_B)
        return replace(plain, input_ids_BT=torch.from_numpy(np.where(masked_BT, self.config.mask_token, inputs_BT)))
