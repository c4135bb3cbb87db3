"""An encoder's rows framed by special tokens; next tokens, masked inputs, dropping, phrases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from megahead.config.data import DataConfig
from megahead.config.masking import DroppingConfig, MaskedInputsConfig, MaskingConfig
from megahead.config.model import ModelConfig
from megahead.config.objective import PhrasesConfig
from megahead.data.batch import Batch, KeptTokens, MaskedPhrases, causal_batch, document_positions
from megahead.data.samples import CounterRng, Purpose
from megahead.data.strategies import Strategy

# An encoder's rows: [CLS], T - 2 tokens of consecutive text (documents follow each other, each closed by its end
# token), [SEP].
#
# RoBERTa's "full sentences" (Liu et al. 2019, arXiv 1907.11692), without pairs of segments. So every row is full, and
# nothing is computed for padding. If documents are isolated, [CLS] belongs to a row's first document, [SEP] to its
# last. B rows, T tokens per row, N targets of the batch.


Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class FramedRows:
    """Rows before any token is masked."""

    tokens_BT: Array
    """int64."""

    maskable_BT: Array
    """bool: tokens of the text but for special ones."""

    ends_BT: Array
    """bool: the last token of each document, where another follows it in the row's text."""

    positions_BT: Array | None
    """int64, each token's position in its document; None if every row is one document."""

    def batch(self, chosen_BT: Array, read_BT: Array) -> Batch:
        """The chosen tokens (bool) are targets; `read_BT`, int64: what is read, in their places and in all others."""
        index_N = np.flatnonzero(chosen_BT)
        return Batch(
            torch.from_numpy(read_BT),
            None if self.positions_BT is None else torch.from_numpy(self.positions_BT),
            torch.from_numpy(index_N),
            torch.from_numpy(self.tokens_BT.reshape(-1)[index_N]),
            max_targets_per_row=int(chosen_BT.sum(1).max(initial=0)),
        )


@dataclass(frozen=True)
class Framing:
    """Makes such rows."""

    masking: MaskingConfig
    end_token: int
    isolate_documents: bool

    def unmaskable(self) -> Sequence[int]:
        """Ids that are never masked."""
        return self.masking.never_masked(self.end_token)

    def rows(self, text: Array, document_starts: Array | None = None) -> FramedRows:
        """Rows of T = t + 2 tokens from `text`, int64 [B, t], negative where a row is empty.

        document_starts: bool [B, t], where documents begin other than after end tokens.
        """
        tokens_BT, ends_BT, last_B = self._framed(text, document_starts)
        closed_BT = np.arange(tokens_BT.shape[1]) == last_B[:, None]
        if self.isolate_documents:
            closed_BT |= ends_BT
        isolated = bool((text < 0).any()) or bool(closed_BT[:, :-1].any())
        positions_BT = document_positions(closed_BT) if isolated else None
        return FramedRows(tokens_BT, ~np.isin(tokens_BT, self.unmaskable()), ends_BT, positions_BT)

    def _framed(self, text: Array, document_starts: Array | None) -> tuple[Array, Array, Array]:
        """Tokens, whether a document ends there (both [B, T]), and the place of [SEP] [B]; what is empty follows it,
        as end tokens."""
        rows, length = text.shape
        tokens_BT = np.full((rows, length + 2), self.end_token, np.int64)
        tokens_BT[:, 0] = self.masking.cls_token
        tokens_BT[:, 1:-1] = np.where(text < 0, self.end_token, text)
        last_B = 1 + (text >= 0).sum(1)
        tokens_BT[np.arange(rows), last_B] = self.masking.sep_token
        ends_BT = tokens_BT == self.end_token
        if document_starts is not None:
            ends_BT[:, 1:length] |= document_starts[:, 1:]  # the token before one that begins a document
        ends_BT &= np.arange(length + 2) < last_B[:, None]
        return tokens_BT, ends_BT, last_B


# From an encoder's rows to next tokens: what it reads and predicts while it learns as a decoder does.
#
# A row is cut and framed as where tokens are masked, so that a sample is the same text whichever of the two is
# learned. B rows, T tokens per row, N targets of the batch.


@dataclass(frozen=True)
class NextTokens:
    """Reads rows as they are; the target of each token is the next one of the text, that of [CLS] the first."""

    framing: Framing

    boundary_targets: bool
    """Whether a document's first token is a target, of the last token of the document before it."""

    def batch(self, text: Array, sample_indices: Sequence[int] | Array, document_starts: Array | None = None) -> Batch:
        """Arguments as of `Framing.rows`; t targets in a full row."""
        rows = self.framing.rows(text, document_starts)
        known_BT = np.zeros(rows.tokens_BT.shape, bool)
        known_BT[:, :-2] = text >= 0
        if not self.boundary_targets:
            known_BT &= ~rows.ends_BT
        index_N = np.flatnonzero(known_BT)
        return Batch(
            torch.from_numpy(rows.tokens_BT),
            None if rows.positions_BT is None else torch.from_numpy(rows.positions_BT),
            torch.from_numpy(index_N),
            torch.from_numpy(rows.tokens_BT.reshape(-1)[index_N + 1]),
        )


# Mask-enhanced autoregressive prediction (MEAP): a decoder that reads some mask tokens, and predicts the text.
#
# Zhuang et al. 2025, arXiv 2502.07490: with a share of its inputs missing a decoder must use the others better.
# Targets are those of the text; nothing else of training changes, and nothing at all at inference. B rows, T inputs
# per row.


@dataclass(frozen=True)
class MaskedInputs:
    """Makes next-token batches with masked inputs. What is masked depends on the sample's number alone."""

    config: MaskedInputsConfig
    data: DataConfig
    seed: int

    def batch(self, rows: Array, sample_indices: Sequence[int] | Array, document_starts: Array | None = None) -> Batch:
        """As `causal_batch` of `rows`, int64 [B, T+1], but for the inputs."""
        plain = causal_batch(
            rows,
            document_starts,
            end_token=self.data.end_token,
            isolate_documents=self.data.isolate_documents,
            boundary_targets=self.data.boundary_targets,
        )
        inputs_BT = plain.input_ids_BT.numpy()
        allowed_BT = inputs_BT != self.data.end_token
        count_B = np.rint(self.config.share * allowed_BT.sum(1))
        masked_BT = CounterRng(self.seed, sample_indices).choice(Purpose.MASKED_INPUTS, allowed_BT, count_B)
        return replace(plain, input_ids_BT=torch.from_numpy(np.where(masked_BT, self.config.mask_token, inputs_BT)))


# Token dropping: which tokens of masked rows an encoder's middle layers compute (Hou et al. 2022, arXiv 2203.13240).
#
# The paper keeps a running mean of the masked-LM loss of each id, and the tokens of a row whose ids have the highest;
# special tokens, mask tokens among them, are always kept. What counts is the id that is read: whether a token is a
# target shows in nothing but its mask. Here importance is the weight of a masking strategy, by default the share of
# times that an id was missed (`difficulty`): whole numbers, which are the same on any mesh.
#
# B rows, T tokens per row.


_MASK, _SPECIAL, _TEXT, _EMPTY = range(4)  # in the order in which tokens are kept


@dataclass(frozen=True)
class TokenDropping:
    """Keeps as many tokens of each row: mask tokens, then other special ones, then those of the largest weight."""

    framing: Framing
    layers: range
    share: float
    importance: Strategy

    @staticmethod
    def of(asked: DroppingConfig, model: ModelConfig, framing: Framing, importance: Strategy) -> TokenDropping:
        """As the settings ask for."""
        return TokenDropping(framing, asked.layers(model), asked.keep_share, importance)

    def kept(self, read_BT: Array, text: Array, step: int, noise: CounterRng) -> KeptTokens:
        """Of rows that are read so; `text`, int64 [B, T - 2], is negative where a row is empty."""
        length = read_BT.shape[1]
        draw_BT = noise.uniform(Purpose.DROPPING_TIES, length)
        weights_BT = self.importance.at(step).weights(read_BT)
        falling_BT = draw_BT if weights_BT is None else -weights_BT
        order_BT = np.lexsort((draw_BT, falling_BT, self._kinds(read_BT, text)))
        kept_BT = np.zeros(read_BT.shape, bool)
        np.put_along_axis(kept_BT, order_BT[:, : max(1, round(self.share * length))], True, axis=1)
        return KeptTokens.where(kept_BT, self.layers, first_reads_all=True)

    def _kinds(self, read_BT: Array, text: Array) -> Array:
        """int64 [B, T]: which are kept before which."""
        kind_BT = np.where(np.isin(read_BT, self.framing.unmaskable()), _SPECIAL, _TEXT)
        kind_BT[read_BT == self.framing.masking.mask_token] = _MASK
        kind_BT[np.arange(read_BT.shape[1]) > 1 + (text >= 0).sum(1)[:, None]] = _EMPTY
        return kind_BT


# Phrases that rows share: which of them are masked, and where the same ones stand in other rows.
#
# After NPM (Min et al. 2023, arXiv 2212.01349). A phrase is a run of text without special tokens, in one document; it
# counts if another row of its *group*, so many consecutive samples, has it too. Groups are parts of micro-batches:
# what is found depends on their samples alone, not on ranks or micro-batches.
#
# B rows, T tokens per row, M = B T tokens, S phrases, P pairs of places; for Q, K and R see `MaskedPhrases`.


@dataclass(frozen=True)
class SharedPhrases:
    """Rows cut into phrases that other rows of their group have, and what is between them."""

    asked: PhrasesConfig
    maskable_BT: Array

    numbers_LM: Sequence[Array]
    """int64, for each length from 1 on: the same number where the same phrase begins, -1 where none does."""

    first_S: Array
    """int64, increasing: the places of the phrases' first tokens."""

    length_S: Array
    """int64: how many tokens each has."""

    @staticmethod
    def of(rows: FramedRows, asked: PhrasesConfig) -> SharedPhrases:
        """From left to right, the longest first. The first row begins a group."""
        numbers_LM = _numbered(rows, asked)
        length_M = np.sum([number_M >= 0 for number_M in numbers_LM], axis=0)
        first, end = [], 0
        for place in np.flatnonzero(length_M >= asked.shortest).tolist():
            if place >= end:
                first.append(place)
                end = place + int(length_M[place])
        first_S = np.array(first, np.int64)
        return SharedPhrases(asked, rows.maskable_BT, numbers_LM, first_S, length_M[first_S])

    def beside(self, strategy: Strategy) -> Strategy:
        """A strategy by which the phrases are units, and `strategy` cuts and weighs what is between them."""
        inside_M = np.zeros(self.maskable_BT.size, bool)
        for offset in range(self.asked.longest):
            inside_M[self.first_S[self.length_S > offset] + offset] = True
        inside_BT = inside_M.reshape(self.maskable_BT.shape)
        return _WithPhrases(strategy, self.maskable_BT, inside_BT, self.first_S, self.length_S, self.asked.share)

    def masked(self, chosen_BT: Array) -> tuple[MaskedPhrases, ...]:
        """For each group, the phrases whose tokens are chosen (bool), and where they are found unmasked."""
        chosen_M, free_M = chosen_BT.reshape(-1), (self.maskable_BT & ~chosen_BT).reshape(-1)
        length, asked_P, found_P = chosen_BT.shape[1], *self._pairs(chosen_M)
        size, groups = self.asked.group_samples * length, []
        for begin in range(0, len(chosen_M), size):
            here_P = asked_P // size == begin // size
            asked_Q = np.unique(asked_P[here_P])
            candidates_K = begin + np.flatnonzero(free_M[begin : begin + size])
            right_QR = _table(np.searchsorted(asked_Q, asked_P[here_P]), np.searchsorted(candidates_K, found_P[here_P]))
            asked, candidates, right = (torch.from_numpy(places) for places in (asked_Q, candidates_K, right_QR))
            groups.append(MaskedPhrases(asked, candidates, right, length))
        return tuple(groups)

    def _pairs(self, chosen_M: Array) -> tuple[Array, Array]:
        """int64 [P] twice: the first token of a chosen phrase and of the same one in another row, if that token is not
        chosen; and the last ones."""
        asked, found, length = [], [], self.maskable_BT.shape[1]
        for size, number_M in enumerate(self.numbers_LM, 1):
            first_S = self.first_S[(self.length_S == size) & chosen_M[self.first_S]]
            mine_P, other_P = _equal(first_S, number_M)
            elsewhere_P = mine_P // length != other_P // length
            for end in (0, size - 1):
                asked.append(mine_P[elsewhere_P] + end)
                found.append(other_P[elsewhere_P] + end)
        asked_P, found_P = np.concatenate(asked), np.concatenate(found)
        return asked_P[~chosen_M[found_P]], found_P[~chosen_M[found_P]]


@dataclass(frozen=True)
class _WithPhrases:
    """Phrases as units, whose tokens have `share` of each row's weight; the rest is `strategy`'s."""

    strategy: Strategy
    maskable_BT: Array
    inside_BT: Array
    first_S: Array
    length_S: Array
    share: float

    def at(self, step: int) -> _WithPhrases:
        return replace(self, strategy=self.strategy.at(step))

    def starts(self, tokens_BT: Array, noise: CounterRng) -> Array:
        starts_BT = self.strategy.starts(tokens_BT, noise) & ~self.inside_BT
        starts_BT.reshape(-1)[np.concatenate([self.first_S, self.first_S + self.length_S])] = True
        return starts_BT

    def weights(self, tokens_BT: Array) -> Array | None:
        weights_BT = self.strategy.weights(tokens_BT)
        weights_BT = np.ones(tokens_BT.shape) if weights_BT is None else weights_BT
        for part_BT, share in ((self.inside_BT, self.share), (self.maskable_BT & ~self.inside_BT, 1 - self.share)):
            sum_B = (weights_BT * part_BT).sum(1, keepdims=True)
            weights_BT = np.where(part_BT, share * weights_BT / np.where(sum_B > 0, sum_B, 1.0), weights_BT)
        return weights_BT


def _numbered(rows: FramedRows, asked: PhrasesConfig) -> list[Array]:
    """int64 [M] for each length, as `SharedPhrases.numbers_LM`: phrases of one token more are found among those that
    begin with a phrase that rows share."""
    count, length = rows.tokens_BT.shape
    token_M = np.where(rows.maskable_BT, rows.tokens_BT, -1).reshape(-1)
    closed_M, base, numbers = rows.ends_BT.reshape(-1), int(token_M.max(initial=0)) + 1, []
    number_M = np.where(token_M >= 0, np.arange(len(token_M)) // (asked.group_samples * length), -1)
    for last in range(asked.longest):
        first_P = np.flatnonzero(number_M[: len(token_M) - last] >= 0)
        joined_P = token_M[first_P + last] >= 0  # a row begins with a special token
        joined_P &= ~closed_M[first_P + last - 1] | (last == 0)
        first_P = first_P[joined_P]
        _, number_P = np.unique(number_M[first_P] * base + token_M[first_P + last], return_inverse=True)
        row_of = np.unique(number_P * count + first_P // length)  # each phrase with each row that has it
        shared_P = np.bincount(row_of // count)[number_P] > 1
        number_M = np.full(len(token_M), -1)
        number_M[first_P[shared_P]] = number_P[shared_P]
        numbers.append(number_M)
    return numbers


def _equal(place_S: Array, number_M: Array) -> tuple[Array, Array]:
    """All pairs of one of `place_S` and a place with the same number."""
    order_M = np.argsort(number_M, kind="stable")
    below_S = np.searchsorted(number_M[order_M], number_M[place_S])
    count_S = np.searchsorted(number_M[order_M], number_M[place_S], "right") - below_S
    return np.repeat(place_S, count_S), order_M[np.repeat(below_S, count_S) + _counted(count_S)]


def _table(line_P: Array, value_P: Array) -> Array:
    """int64 [Q, R]: the values of each line, and -1 behind them; R is at least 1."""
    order_P, count_Q = np.argsort(line_P, kind="stable"), np.bincount(line_P)
    table_QR = np.full((len(count_Q), count_Q.max(initial=1)), -1)
    table_QR[line_P[order_P], _counted(count_Q)] = value_P[order_P]
    return table_QR


def _counted(count_S: Array) -> Array:
    """int64: 0, 1, ... as far as each count goes, one after another."""
    nth_P: Array = np.arange(count_S.sum()) - np.repeat(count_S.cumsum() - count_S, count_S)
    return nth_P
