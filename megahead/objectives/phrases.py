"""Phrases as candidates: the ends of a masked phrase are compared with tokens of other rows, where it may stand, too.

The training objective of NPM (Min et al. 2023, arXiv 2212.01349, section 3.3). With h the outputs and T a temperature
(the paper's is the root of their width), a masked phrase from a to b costs

    - log sum_{y in A} exp(h_a h_y / T) / sum_{y in C} exp(h_a h_y / T)
    - log sum_{y in B} exp(h_b h_y / T) / sum_{y in C} exp(h_b h_y / T)

C: the unmasked tokens of the other rows; A: those of them with which the same phrase begins, B: with which it ends.

Q ends of phrases, K candidate tokens, at most R of them right for an end, D features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, NamedTuple

import torch
from torch import Tensor

from megahead.objectives.detection import Number


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
