"""The weight of each candidate in the softmax, the only thing in which the headless objectives differ.

All are `loss_i = log( exp(s_p + b'_p) + sum_{u != p} exp(s_u + b_u) ) - s_p - b'_p`, where p is the positive (target)
of output i and s_u = h_i.e_u / T. b' may differ from b, and only some objectives have the last term.

q: distribution of targets, r: of random negatives; N targets of a candidate group, M random negatives, P different ids
among both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Bias = Literal["paper", "once", "corrected", "own_once"]


@dataclass(frozen=True)
class Weighting:
    """Biases of one candidate group's candidates; float64 [P]."""

    bias_P: Tensor
    """b: for outputs with another target than the id."""

    positive_bias_P: Tensor
    """b': for outputs whose target the id is."""

    subtracts_positive_bias: bool
    """Whether the loss has the term - b'_p. The paper's loss has not, which does not change gradients."""


def weigh(bias: Bias, multiplicity_P: Tensor, log_inclusion_P: Tensor | None) -> Weighting:
    """The weighting named `bias` of ids that are candidates `multiplicity_P` times (targets and draws together).

    log_inclusion_P: log-probability that an id is a candidate at all, for `corrected`.
    """
    log_count_P = multiplicity_P.double().log()
    even_P = torch.zeros_like(log_count_P)
    if bias == "paper":
        return Weighting(log_count_P, log_count_P, subtracts_positive_bias=False)
    if bias == "once":
        return Weighting(even_P, even_P, subtracts_positive_bias=False)
    if bias == "own_once":
        return Weighting(log_count_P, even_P, subtracts_positive_bias=False)
    if log_inclusion_P is None:
        raise ValueError("the corrected bias needs the probabilities of being a candidate")
    return Weighting(-log_inclusion_P, -log_inclusion_P, subtracts_positive_bias=True)


def weight_beside(bias: Bias, multiplicity_P: Tensor, log_inclusion_P: Tensor | None) -> Tensor:
    """float64 [P]: b of each candidate beside one output whose target it is: had it been a candidate once less. What
    `log_mean_weight` is on average, for where no q is known."""
    return weigh(bias, multiplicity_P - 1, log_inclusion_P).bias_P.masked_fill(multiplicity_P == 1, -torch.inf)


def with_nearest(log_q_V: Tensor, nearest_VK: Tensor) -> Tensor:
    """log of the probability, float64, that one target, drawn from q, brings an id: as the target, or as one of its K
    nearest ids, which never both happens."""
    q_V = log_q_V.double().exp()
    size = len(nearest_VK)
    brought_V = q_V.index_add(0, nearest_VK.flatten(), q_V[:size, None].expand_as(nearest_VK).flatten())
    return brought_V.clamp(max=1 - 1e-9).log()


def log_inclusion(log_q_V: Tensor, targets: float, log_r_V: Tensor | None = None, draws: int = 0) -> Tensor:
    """log pi, float64: pi_u = 1 - (1 - q_u)^N (1 - r_u)^M, the probability that id u is among a group's candidates."""
    log_absent_V = targets * torch.log1p(-log_q_V.double().exp())
    if log_r_V is not None:
        log_absent_V = log_absent_V + draws * torch.log1p(-log_r_V.double().exp())
    return torch.log(-torch.expm1(log_absent_V))


def log_mean_weight(
    bias: Bias, log_q_V: Tensor, targets: float, log_r_V: Tensor | None = None, draws: int = 0
) -> Tensor:
    """float64: log of what each id weighs on average in a group of so many targets and draws, where it counts as 0 when
    it is no candidate. Of `corrected` without its b = -log pi."""
    if bias in ("once", "corrected"):
        return log_inclusion(log_q_V, targets, log_r_V, draws)
    weight_V = targets * log_q_V.double().exp()
    return (weight_V if log_r_V is None else weight_V + draws * log_r_V.double().exp()).log()
