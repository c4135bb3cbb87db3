"""Random draws on the CPU: of negatives, and of the candidates that stay if there are too many.

Results depend on the generator's seed alone: the same on every machine and mesh. V vocabulary, P some ids.
"""

from __future__ import annotations

import torch
from torch import Tensor


def draw_ids(below_V: Tensor, draws: int, generator: torch.Generator) -> Tensor:
    """int64 [draws]: ids drawn with replacement. `below_V`: running sums of their weights, float64. O(draws log V)."""
    uniform = torch.rand(draws, generator=generator, dtype=torch.float64) * below_V[-1]
    return torch.searchsorted(below_V, uniform, right=True).clamp_(max=len(below_V) - 1)


def inclusion_probabilities(weights_P: Tensor, size: int) -> Tensor:
    """float64 [P]: probabilities that add up to `size`, proportional to the weights but at most 1.

    With these, a sample of `size` estimates a sum of terms near the weights with the least variance. Ids of weight 0
    have 0; all others have 1 if there are no more than `size` of them.
    """
    certain_P = torch.zeros_like(weights_P, dtype=torch.bool)
    while True:
        rest_P = weights_P.double().masked_fill(certain_P, 0.0)
        left, total = size - int(certain_P.sum()), rest_P.sum()
        if total == 0:
            return certain_P.double()
        chances_P = rest_P * (left / total)
        over_P = chances_P >= 1.0
        if not over_P.any():
            return chances_P + certain_P
        certain_P |= over_P


def systematic_sample(chances_P: Tensor, generator: torch.Generator) -> Tensor:
    """bool [P]: a sample that has each id with its given probability; its size is their sum, rounded.

    The probabilities are laid end to end on a line, in random order and with a random shift; those that cover an
    integer are chosen (Madow 1949).
    """
    chosen_P = chances_P >= 1.0
    open_ids = ((chances_P > 0) & ~chosen_P).nonzero().squeeze(1)
    open_ids = open_ids[torch.randperm(len(open_ids), generator=generator)]
    ends = chances_P[open_ids].cumsum(0) + torch.rand(1, generator=generator, dtype=torch.float64)
    teeth = ends.floor().diff(prepend=torch.zeros(1, dtype=torch.float64))
    chosen_P[open_ids[teeth > 0]] = True
    return chosen_P
