"""Phrases as candidates (NPM: Min et al. 2023, arXiv 2212.01349): contrasts the ends (first and last tokens) of masked
phrases with tokens of other rows; the same phrase's ends are positives.

B rows, T tokens per row, M = B T tokens, L lengths of phrases, S phrases, P pairs of tokens, Q ends of phrases, K
candidate tokens, R the largest number of positives of an end, D features. Token indices are into the flattened rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megahead.config.auxiliaries import PhrasesConfig
from megahead.config.run import RunConfig
from megahead.data.batch import Batch, EncoderRows, RowCollator
from megahead.data.masking import MaskingCollator
from megahead.data.samples import CounterRng
from megahead.data.strategy import Strategy
from megahead.objectives.auxiliary import Auxiliary, ForwardContext

Array = np.ndarray[Any, Any]


class Phrases(Auxiliary):
    """The phrase objective: contrasts the hidden states of tokens within each group of rows."""

    module_name = "phrases"

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        settings = config.objective.phrases
        assert settings is not None
        self._temperature = settings.temperature or config.model.hidden_size**0.5

    @classmethod
    def collator(cls, collator: RowCollator, config: RunConfig, seed: int) -> RowCollator:
        """A collator that also masks phrases."""
        settings = config.objective.phrases
        assert isinstance(collator, MaskingCollator)
        assert settings is not None
        longest = collator.config.max_unit_length(config.data.sequence_length, settings.longest)
        return PhraseCollator(collator, settings.model_copy(update={"longest": longest}))

    def sums(self, context: ForwardContext) -> Mapping[str, Tensor]:
        """`loss` in nats; `ends`: the number of ends; `found`: the number of ends whose best candidate is a
        positive."""
        assert context.hidden_MD is not None
        groups = []
        for group in context.batch.auxiliary:
            indices = group.ends_Q, group.candidates_K
            ends_QD, candidates_KD = (context.hidden_MD.index_select(0, index) for index in indices)
            row_Q, row_K = (index // group.row_length for index in indices)
            is_other_row_QK = row_Q[:, None] != row_K
            groups.append(phrase_sums(ends_QD, candidates_KD, is_other_row_QK, group.positives_QR, self._temperature))
        return {name: torch.stack([group[name] for group in groups]).sum() for name in groups[0]}


# The objective (section 3.3 of the paper). With h the outputs and T a temperature, a masked phrase from a to b costs
#
#     - log sum_{y in A} exp(h_a h_y / T) / sum_{y in C} exp(h_a h_y / T)
#     - log sum_{y in B} exp(h_b h_y / T) / sum_{y in C} exp(h_b h_y / T)
#
# C: the unmasked tokens of the other rows; A: the first tokens of the same phrase among them, B: its last tokens.


def phrase_sums(
    ends_QD: Tensor, candidates_KD: Tensor, allowed_QK: Tensor, positives_QR: Tensor, temperature: float
) -> dict[str, Tensor]:
    """The sums of `Phrases.sums` over all ends; differentiable by the hidden states of ends and candidates.

    allowed_QK: bool, the candidates of each end. positives_QR: int64, the indices of its positives among them, at least
    one, padded with -1. For Q = 0 the loss is a differentiable 0.
    """
    products_QK = ends_QD @ candidates_KD.T
    scores_QK = products_QK.to(torch.promote_types(products_QK.dtype, torch.float32)) / temperature
    scores_QK = scores_QK.masked_fill(~allowed_QK, -torch.inf)
    positive_scores_QR = scores_QK.gather(1, positives_QR.clamp(min=0)).masked_fill(positives_QR < 0, -torch.inf)
    loss = (scores_QK.logsumexp(1) - positive_scores_QR.logsumexp(1)).sum()
    is_missed_Q = (scores_QK > positive_scores_QR.amax(1, keepdim=True)).any(1)
    return {"loss": loss, "ends": torch.full((), len(ends_QD), device=loss.device), "found": (~is_missed_Q).sum()}


# A phrase is an n-gram without special tokens, in one document, that another row of its *group* (`group_samples`
# consecutive samples) also contains. Groups are parts of micro-batches, so that a group's phrases depend only on its
# samples.


class MaskedPhrases(NamedTuple):
    """The ends of the masked phrases of a group of rows, and their candidates."""

    ends_Q: Tensor
    """int64, increasing: indices of the first and last tokens of masked phrases with positives."""

    candidates_K: Tensor
    """int64, increasing: indices of the group's unmasked tokens."""

    positives_QR: Tensor
    """int64: for each end, the candidates that are the same end of the same phrase in other rows; padded with -1."""

    row_length: int
    """T."""


@dataclass(frozen=True)
class SharedPhrases:
    """The disjoint phrases of rows that other rows of their group contain."""

    settings: PhrasesConfig
    maskable_BT: Array

    phrase_ids_LM: Sequence[Array]
    """int64, for each length from 1 on: the id of the phrase that starts at each token, -1 without one."""

    first_S: Array
    """int64, increasing: indices of the phrases' first tokens."""

    length_S: Array
    """int64: numbers of tokens."""

    @staticmethod
    def of(rows: EncoderRows, settings: PhrasesConfig) -> SharedPhrases:
        """The phrases, selected left to right, at each token the longest. `rows` begin with a group's first row."""
        phrase_ids_LM = _compute_phrase_ids(rows, settings)
        length_M = np.sum([phrase_id_M >= 0 for phrase_id_M in phrase_ids_LM], axis=0)
        starts, end = [], 0
        for start in np.flatnonzero(length_M >= settings.shortest).tolist():
            if start >= end:
                starts.append(start)
                end = start + int(length_M[start])
        first_S = np.array(starts, np.int64)
        return SharedPhrases(settings, rows.maskable_BT, phrase_ids_LM, first_S, length_M[first_S])

    def wrap_strategy(self, strategy: Strategy) -> Strategy:
        """A strategy with the phrases as masking units (spans of tokens that are masked together), and the units of
        `strategy` between them."""
        in_phrase_M = np.zeros(self.maskable_BT.size, bool)
        for offset in range(self.settings.longest):
            in_phrase_M[self.first_S[self.length_S > offset] + offset] = True
        return _PhraseStrategy(strategy, self, in_phrase_M.reshape(self.maskable_BT.shape))

    def masked_phrases(self, is_masked_BT: Array) -> tuple[MaskedPhrases, ...]:
        """For each group, the masked phrases (`is_masked_BT`: bool), and their unmasked positives."""
        is_masked_M, is_unmasked_M = is_masked_BT.reshape(-1), (self.maskable_BT & ~is_masked_BT).reshape(-1)
        row_length, end_P, positive_P = is_masked_BT.shape[1], *self._positive_pairs(is_masked_M)
        group_size, groups = self.settings.group_samples * row_length, []
        for start in range(0, len(is_masked_M), group_size):
            in_group_P = end_P // group_size == start // group_size
            ends_Q = np.unique(end_P[in_group_P])
            candidates_K = start + np.flatnonzero(is_unmasked_M[start : start + group_size])
            end_index_P = np.searchsorted(ends_Q, end_P[in_group_P])
            positives_QR = _group_by_end(end_index_P, np.searchsorted(candidates_K, positive_P[in_group_P]))
            ends, candidates, positives = map(torch.from_numpy, (ends_Q, candidates_K, positives_QR))
            groups.append(MaskedPhrases(ends, candidates, positives, row_length))
        return tuple(groups)

    def _positive_pairs(self, is_masked_M: Array) -> tuple[Array, Array]:
        """int64 [P] each: the ends of masked phrases, and the unmasked ends of the same phrases in other rows."""
        ends, positives, row_length = [], [], self.maskable_BT.shape[1]
        for size, phrase_id_M in enumerate(self.phrase_ids_LM, 1):
            first_S = self.first_S[(self.length_S == size) & is_masked_M[self.first_S]]
            first_P, match_P = _matching_pairs(first_S, phrase_id_M)
            is_other_row_P = first_P // row_length != match_P // row_length
            for offset in (0, size - 1):
                ends.append(first_P[is_other_row_P] + offset)
                positives.append(match_P[is_other_row_P] + offset)
        end_P, positive_P = np.concatenate(ends), np.concatenate(positives)
        return end_P[~is_masked_M[positive_P]], positive_P[~is_masked_M[positive_P]]


@dataclass(frozen=True)
class PhraseCollator(RowCollator):
    """Masks rows as `inner` does, but phrases that several rows of a group share as units. Masks depend only on the
    group's samples."""

    inner: MaskingCollator
    settings: PhrasesConfig

    def batch(self, text: Array, sample_indices: Sequence[int] | Array, document_starts: Array | None = None) -> Batch:
        rows = self.inner.row_builder.build(text, document_starts)
        phrases = SharedPhrases.of(rows, self.settings)
        batch = self.inner.mask_rows(rows, text, sample_indices, phrases.wrap_strategy)
        is_masked_BT = np.zeros(rows.tokens_BT.shape, bool)
        is_masked_BT.reshape(-1)[batch.target_index_N.numpy()] = True
        return replace(batch, auxiliary=phrases.masked_phrases(is_masked_BT))


@dataclass(frozen=True)
class _PhraseStrategy(Strategy):
    """Masks phrases as units. All phrases of a row together get `settings.share` of its weight; the units of `strategy`
    between them get the rest."""

    strategy: Strategy
    phrases: SharedPhrases
    in_phrase_BT: Array

    def at(self, step: int) -> _PhraseStrategy:
        return replace(self, strategy=self.strategy.at(step))

    def starts(self, tokens_BT: Array, rng: CounterRng) -> Array:
        starts_BT = self.strategy.starts(tokens_BT, rng) & ~self.in_phrase_BT
        first_S = self.phrases.first_S
        starts_BT.reshape(-1)[np.concatenate([first_S, first_S + self.phrases.length_S])] = True
        return starts_BT

    def weights(self, tokens_BT: Array) -> Array | None:
        weights_BT = self.strategy.weights(tokens_BT)
        weights_BT = np.ones(tokens_BT.shape) if weights_BT is None else weights_BT
        between_BT, share_of_phrases = self.phrases.maskable_BT & ~self.in_phrase_BT, self.phrases.settings.share
        for part_BT, share in ((self.in_phrase_BT, share_of_phrases), (between_BT, 1 - share_of_phrases)):
            sum_B = (weights_BT * part_BT).sum(1, keepdims=True)
            weights_BT = np.where(part_BT, share * weights_BT / np.where(sum_B > 0, sum_B, 1.0), weights_BT)
        return weights_BT


def _compute_phrase_ids(rows: EncoderRows, settings: PhrasesConfig) -> list[Array]:
    """`SharedPhrases.phrase_ids_LM`, int64 [M] for each length. Phrases of length n + 1 extend those of length n."""
    num_rows, row_length = rows.tokens_BT.shape
    token_M = np.where(rows.maskable_BT, rows.tokens_BT, -1).reshape(-1)
    is_document_end_M, base, phrase_ids = rows.document_ends_BT.reshape(-1), int(token_M.max(initial=0)) + 1, []
    phrase_id_M = np.where(token_M >= 0, np.arange(len(token_M)) // (settings.group_samples * row_length), -1)
    for last in range(settings.longest):
        first_P = np.flatnonzero(phrase_id_M[: len(token_M) - last] >= 0)
        is_phrase_P = token_M[first_P + last] >= 0  # false across rows, which start with a special token
        is_phrase_P &= ~is_document_end_M[first_P + last - 1] | (last == 0)
        first_P = first_P[is_phrase_P]
        _, id_P = np.unique(phrase_id_M[first_P] * base + token_M[first_P + last], return_inverse=True)
        id_and_row = np.unique(id_P * num_rows + first_P // row_length)
        is_shared_P = np.bincount(id_and_row // num_rows)[id_P] > 1
        phrase_id_M = np.full(len(token_M), -1)
        phrase_id_M[first_P[is_shared_P]] = id_P[is_shared_P]
        phrase_ids.append(phrase_id_M)
    return phrase_ids


def _matching_pairs(index_S: Array, phrase_id_M: Array) -> tuple[Array, Array]:
    """int64 [P] each: all pairs of one of `index_S` and an index with the same phrase id."""
    order_M = np.argsort(phrase_id_M, kind="stable")
    start_S = np.searchsorted(phrase_id_M[order_M], phrase_id_M[index_S])
    count_S = np.searchsorted(phrase_id_M[order_M], phrase_id_M[index_S], "right") - start_S
    return np.repeat(index_S, count_S), order_M[np.repeat(start_S, count_S) + _concatenated_ranges(count_S)]


def _group_by_end(end_index_P: Array, value_P: Array) -> Array:
    """int64 [Q, R]: the values of each end, padded with -1; R is at least 1."""
    order_P, count_Q = np.argsort(end_index_P, kind="stable"), np.bincount(end_index_P)
    values_QR = np.full((len(count_Q), count_Q.max(initial=1)), -1)
    values_QR[end_index_P[order_P], _concatenated_ranges(count_Q)] = value_P[order_P]
    return values_QR


def _concatenated_ranges(count_S: Array) -> Array:
    """int64: the concatenated ranges 0, 1, ..., count - 1."""
    range_P: Array = np.arange(count_S.sum()) - np.repeat(count_S.cumsum() - count_S, count_S)
    return range_P
