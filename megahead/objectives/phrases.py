"""What a model learns of masked phrases beside its masked tokens. M = B T tokens, D features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple

import torch
from torch import Tensor

from megahead.config.objective import PhrasesConfig
from megahead.data.batch import MaskedPhrases
from megahead.losses.detection import Number

# Phrases as candidates: the ends of a masked phrase are compared with tokens of other rows, where it may stand, too.
#
# The training objective of NPM (Min et al. 2023, arXiv 2212.01349, section 3.3). With h the outputs and T a
# temperature (the paper's is the root of their width), a masked phrase from a to b costs
#
#     - log sum_{y in A} exp(h_a h_y / T) / sum_{y in C} exp(h_a h_y / T)
#     - log sum_{y in B} exp(h_b h_y / T) / sum_{y in C} exp(h_b h_y / T)
#
# C: the unmasked tokens of the other rows; A: those of them with which the same phrase begins, B: with which it ends.
#
# Q ends of phrases, K candidate tokens, at most R of them right for an end, D features.


class PhraseSums(NamedTuple, Generic[Number]):
    """How well the same phrases are found, summed up."""

    loss: Number
    """In nats."""

    ends: Number
    """Q."""

    found: Number
    """Of how many of them no other token is more like than one of the same phrase."""


@dataclass(frozen=True)
class PhraseResult:
    """The same as means over the ends, 0 where there are none, and how many these are."""

    loss: float
    found: float
    ends: float

    @staticmethod
    def of(sums: PhraseSums[float]) -> PhraseResult:
        """Of all ends that were summed up."""
        return PhraseResult(sums.loss / max(sums.ends, 1), sums.found / max(sums.ends, 1), sums.ends)


def phrase_sums(
    ends_QD: Tensor, candidates_KD: Tensor, allowed_QK: Tensor, right_QR: Tensor, temperature: float
) -> PhraseSums[Tensor]:
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
    return PhraseSums(loss, torch.full((), len(ends_QD), device=loss.device), (~missed_Q).sum())


# What a model learns of masked phrases beside its masked tokens. M = B T tokens, D features.


class PhraseLoss:
    """Of all groups of a batch; `note`, where something wants to know, is told their sums."""

    def __init__(self, asked: PhrasesConfig) -> None:
        self._asked = asked
        self.note: Callable[[PhraseSums[Tensor]], None] | None = None

    def __call__(self, outputs_MD: Tensor, groups: Sequence[MaskedPhrases]) -> Tensor:
        """Scalar, summed over all ends by their weight. outputs_MD: of all tokens, rows concatenated."""
        of_groups = zip(*(self._sums(outputs_MD, group) for group in groups), strict=True)
        sums = PhraseSums(*(torch.stack(values).sum() for values in of_groups))
        if self.note is not None:
            self.note(sums)
        return self._asked.weight * sums.loss

    def _sums(self, outputs_MD: Tensor, group: MaskedPhrases) -> PhraseSums[Tensor]:
        ends_QD, candidates_KD = (outputs_MD.index_select(0, at) for at in (group.ends_Q, group.candidates_K))
        temperature = self._asked.temperature or outputs_MD.shape[1] ** 0.5
        row_Q, row_K = (at // group.row_length for at in (group.ends_Q, group.candidates_K))
        return phrase_sums(ends_QD, candidates_KD, row_Q[:, None] != row_K, group.right_QR, temperature)
