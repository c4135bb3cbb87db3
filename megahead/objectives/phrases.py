"""Phrases as candidates (NPM: Min et al. 2023, arXiv 2212.01349): the ends of a masked phrase are compared with tokens
of other rows, where the same phrase may stand, too.

B rows, T tokens per row, M = B T tokens, S phrases, P pairs of places, Q ends of phrases, K candidate tokens, at most R
of them right for an end, D features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megahead.config.phrases import PhrasesConfig
from megahead.config.run import RunConfig
from megahead.data.batch import Batch, RowCollator
from megahead.data.framing import FramedRows
from megahead.data.masking import MaskingCollator
from megahead.data.samples import CounterRng
from megahead.data.strategy import Strategy
from megahead.objectives.auxiliary import Auxiliary, Pass

Array = np.ndarray[Any, Any]


class Phrases(Auxiliary):
    """Compares the hidden states of all tokens, group by group."""

    key = "phrases"

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        settings = config.objective.phrases
        assert settings is not None
        self._temperature = settings.temperature or config.model.hidden_size**0.5

    @classmethod
    def collator(cls, collator: RowCollator, config: RunConfig, seed: int) -> RowCollator:
        """Masks phrases, too."""
        assert isinstance(collator, MaskingCollator)
        assert config.objective.phrases is not None
        return PhraseCollator(collator, config.objective.phrases)

    def sums(self, given: Pass) -> Mapping[str, Tensor]:
        """`loss` in nats, `ends`, and of how many of them the same phrase is `found` before all other tokens."""
        assert given.hidden_MD is not None
        groups = []
        for group in given.batch.auxiliary:
            places = group.ends_Q, group.candidates_K
            ends_QD, candidates_KD = (given.hidden_MD.index_select(0, at) for at in places)
            row_Q, row_K = (at // group.row_length for at in places)
            elsewhere_QK = row_Q[:, None] != row_K
            groups.append(phrase_sums(ends_QD, candidates_KD, elsewhere_QK, group.right_QR, self._temperature))
        return {name: torch.stack([group[name] for group in groups]).sum() for name in groups[0]}


# The objective (section 3.3 of the paper). With h the outputs and T a temperature, a masked phrase from a to b costs
#
#     - log sum_{y in A} exp(h_a h_y / T) / sum_{y in C} exp(h_a h_y / T)
#     - log sum_{y in B} exp(h_b h_y / T) / sum_{y in C} exp(h_b h_y / T)
#
# C: the unmasked tokens of the other rows; A: those of them with which the same phrase begins, B: with which it ends.


def phrase_sums(
    ends_QD: Tensor, candidates_KD: Tensor, allowed_QK: Tensor, right_QR: Tensor, temperature: float
) -> dict[str, Tensor]:
    """Over all ends; the loss has a gradient for both kinds of outputs.

    allowed_QK: bool, which tokens an end is compared with. right_QR: int64, which of these are right for it, at least
    one, and -1 behind them. For Q = 0 the loss is 0, connected to its inputs.
    """
    products_QK = ends_QD @ candidates_KD.T
    scores_QK = products_QK.to(torch.promote_types(products_QK.dtype, torch.float32)) / temperature
    scores_QK = scores_QK.masked_fill(~allowed_QK, -torch.inf)
    of_right_QR = scores_QK.gather(1, right_QR.clamp(min=0)).masked_fill(right_QR < 0, -torch.inf)
    loss = (scores_QK.logsumexp(1) - of_right_QR.logsumexp(1)).sum()
    missed_Q = (scores_QK > of_right_QR.amax(1, keepdim=True)).any(1)
    return {"loss": loss, "ends": torch.full((), len(ends_QD), device=loss.device), "found": (~missed_Q).sum()}


# A phrase is a run of text without special tokens, in one document; it counts if another row of its *group*, so many
# consecutive samples, has it too. Groups are parts of micro-batches: what is found depends on their samples alone.


class MaskedPhrases(NamedTuple):
    """The ends of Q / 2 or more masked phrases of a group of rows, and K tokens among which they are looked for."""

    ends_Q: Tensor
    """int64, increasing: which of the B * T tokens are the first or last of a masked phrase that is among the K."""

    candidates_K: Tensor
    """int64, increasing: the unmasked tokens of the group's text."""

    right_QR: Tensor
    """int64: at which of the K the same phrase begins (or ends) as at each end, in other rows; -1 behind the last."""

    row_length: int
    """T."""


@dataclass(frozen=True)
class SharedPhrases:
    """Rows cut into phrases that other rows of their group have, and what is between them."""

    settings: PhrasesConfig
    maskable_BT: Array

    numbers_LM: Sequence[Array]
    """int64, for each length from 1 on: the same number where the same phrase begins, -1 where none does."""

    first_S: Array
    """int64, increasing: the places of the phrases' first tokens."""

    length_S: Array
    """int64: how many tokens each has."""

    @staticmethod
    def of(rows: FramedRows, settings: PhrasesConfig) -> SharedPhrases:
        """From left to right, the longest first. The first row begins a group."""
        numbers_LM = _numbered(rows, settings)
        length_M = np.sum([number_M >= 0 for number_M in numbers_LM], axis=0)
        first, end = [], 0
        for place in np.flatnonzero(length_M >= settings.shortest).tolist():
            if place >= end:
                first.append(place)
                end = place + int(length_M[place])
        first_S = np.array(first, np.int64)
        return SharedPhrases(settings, rows.maskable_BT, numbers_LM, first_S, length_M[first_S])

    def with_phrases(self, strategy: Strategy) -> Strategy:
        """A strategy by which the phrases are units, and `strategy` cuts and weighs what is between them."""
        inside_M = np.zeros(self.maskable_BT.size, bool)
        for offset in range(self.settings.longest):
            inside_M[self.first_S[self.length_S > offset] + offset] = True
        inside_BT = inside_M.reshape(self.maskable_BT.shape)
        return _WithPhrases(strategy, self.maskable_BT, inside_BT, self.first_S, self.length_S, self.settings.share)

    def masked(self, chosen_BT: Array) -> tuple[MaskedPhrases, ...]:
        """For each group, the phrases whose tokens are chosen (bool), and where they are found unmasked."""
        chosen_M, free_M = chosen_BT.reshape(-1), (self.maskable_BT & ~chosen_BT).reshape(-1)
        length, query_P, found_P = chosen_BT.shape[1], *self._pairs(chosen_M)
        size, groups = self.settings.group_samples * length, []
        for begin in range(0, len(chosen_M), size):
            here_P = query_P // size == begin // size
            query_Q = np.unique(query_P[here_P])
            candidates_K = begin + np.flatnonzero(free_M[begin : begin + size])
            right_QR = _table(np.searchsorted(query_Q, query_P[here_P]), np.searchsorted(candidates_K, found_P[here_P]))
            ends, candidates, right = (torch.from_numpy(places) for places in (query_Q, candidates_K, right_QR))
            groups.append(MaskedPhrases(ends, candidates, right, length))
        return tuple(groups)

    def _pairs(self, chosen_M: Array) -> tuple[Array, Array]:
        """int64 [P] twice: the first token of a chosen phrase and of the same one in another row, if that token is not
        chosen; and the last ones."""
        query, found, length = [], [], self.maskable_BT.shape[1]
        for size, number_M in enumerate(self.numbers_LM, 1):
            first_S = self.first_S[(self.length_S == size) & chosen_M[self.first_S]]
            mine_P, other_P = _equal(first_S, number_M)
            elsewhere_P = mine_P // length != other_P // length
            for end in (0, size - 1):
                query.append(mine_P[elsewhere_P] + end)
                found.append(other_P[elsewhere_P] + end)
        query_P, found_P = np.concatenate(query), np.concatenate(found)
        return query_P[~chosen_M[found_P]], found_P[~chosen_M[found_P]]


@dataclass(frozen=True)
class PhraseCollator(RowCollator):
    """Masks rows by `inner`, phrases that rows of a group share among them. What is masked depends on the samples of
    the group."""

    inner: MaskingCollator
    settings: PhrasesConfig

    def batch(self, text: Array, sample_indices: Sequence[int] | Array, document_starts: Array | None = None) -> Batch:
        rows = self.inner.framing.frame(text, document_starts)
        shared = SharedPhrases.of(rows, self.settings)
        batch = self.inner.mask_rows(rows, text, sample_indices, shared.with_phrases)
        chosen_BT = np.zeros(rows.tokens_BT.shape, bool)
        chosen_BT.reshape(-1)[batch.target_index_N.numpy()] = True
        return replace(batch, auxiliary=shared.masked(chosen_BT))


@dataclass(frozen=True)
class _WithPhrases(Strategy):
    """Phrases as units, whose tokens have `share` of each row's weight; the rest is `strategy`'s."""

    strategy: Strategy
    maskable_BT: Array
    inside_BT: Array
    first_S: Array
    length_S: Array
    share: float

    def at(self, step: int) -> _WithPhrases:
        return replace(self, strategy=self.strategy.at(step))

    def starts(self, tokens_BT: Array, rng: CounterRng) -> Array:
        starts_BT = self.strategy.starts(tokens_BT, rng) & ~self.inside_BT
        starts_BT.reshape(-1)[np.concatenate([self.first_S, self.first_S + self.length_S])] = True
        return starts_BT

    def weights(self, tokens_BT: Array) -> Array | None:
        weights_BT = self.strategy.weights(tokens_BT)
        weights_BT = np.ones(tokens_BT.shape) if weights_BT is None else weights_BT
        for part_BT, share in ((self.inside_BT, self.share), (self.maskable_BT & ~self.inside_BT, 1 - self.share)):
            sum_B = (weights_BT * part_BT).sum(1, keepdims=True)
            weights_BT = np.where(part_BT, share * weights_BT / np.where(sum_B > 0, sum_B, 1.0), weights_BT)
        return weights_BT


def _numbered(rows: FramedRows, settings: PhrasesConfig) -> list[Array]:
    """int64 [M] for each length, as `SharedPhrases.numbers_LM`: phrases of one token more are found among those that
    begin with a phrase that rows share."""
    count, length = rows.tokens_BT.shape
    token_M = np.where(rows.maskable_BT, rows.tokens_BT, -1).reshape(-1)
    closed_M, base, numbers = rows.ends_BT.reshape(-1), int(token_M.max(initial=0)) + 1, []
    number_M = np.where(token_M >= 0, np.arange(len(token_M)) // (settings.group_samples * length), -1)
    for last in range(settings.longest):
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
