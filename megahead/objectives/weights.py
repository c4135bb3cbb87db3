"""The weight of each candidate in the softmax: all in which the headless objectives differ.

All are `loss_i = log( exp(s_p + b'_p) + sum_{u != p} exp(s_u + b_u) ) - s_p - b'_p`, p the positive of output i and
s_u = h_i.e_u / T. b' may differ from b, and only some objectives have the last term.

q the distribution of targets, r that of drawn negatives, N targets of the group, M draws; V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Bias = Literal["paper", "once", "corrected", "own_once"]


@dataclass(frozen=True)
class Weighting:
    """Biases of one group's candidates, by id; float64 [V], -inf where an id is no candidate."""

    bias_V: Tensor
    """b: for outputs of which the id is not the positive."""

    positive_bias_V: Tensor
    """b': for outputs of which the id is the positive."""

    subtracts_positive_bias: bool
    """Whether the loss has the term - b'_p. The paper's has not: it does not change the gradient."""


def weigh(bias: Bias, multiplicity_V: Tensor, log_inclusion_V: Tensor | None) -> Weighting:
    """The weighting named `bias` of ids that are candidates `multiplicity_V` times (targets and draws together).

    log_inclusion_V: log-probability that an id is a candidate at all, for `corrected`.
    """
    absent_V = multiplicity_V == 0
    log_count_V = multiplicity_V.double().log()
    even_V = torch.zeros_like(log_count_V).masked_fill_(absent_V, -torch.inf)
    if bias == "paper":
        return Weighting(log_count_V, log_count_V, subtracts_positive_bias=False)
    if bias == "once":
        return Weighting(even_V, even_V, subtracts_positive_bias=False)
    if bias == "own_once":
        return Weighting(log_count_V, even_V, subtracts_positive_bias=False)
    if log_inclusion_V is None:
        raise ValueError("the corrected bias needs the probabilities of being a candidate")
    corrected_V = (-log_inclusion_V).masked_fill(absent_V, -torch.inf)
    return Weighting(corrected_V, corrected_V, subtracts_positive_bias=True)


def log_inclusion(log_q_V: Tensor, targets: float, log_r_V: Tensor | None = None, draws: int = 0) -> Tensor:
    """log pi, float64: pi_u = 1 - (1 - q_u)^N (1 - r_u)^M, the probability that id u is among a group's candidates."""
    log_absent_V = targets * torch.log1p(-log_q_V.double().exp())
    if log_r_V is not None:
        log_absent_V = log_absent_V + draws * torch.log1p(-log_r_V.double().exp())
    return torch.log(-torch.expm1(log_absent_V))
