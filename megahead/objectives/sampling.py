"""Random draws on the CPU: which negatives are drawn, and which candidates are kept when there are too many.

Everything here is a function of its generator's seed: the same on every machine and mesh. V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def draw_counts(probabilities_V: Tensor, draws: int, generator: torch.Generator) -> Tensor:
    """int64 [V]: how often each id comes up in `draws` draws with replacement. O(V + draws log V)."""
    cumulative_V = probabilities_V.double().cumsum(0)
    uniform = torch.rand(draws, generator=generator, dtype=torch.float64) * cumulative_V[-1]
    ids = torch.searchsorted(cumulative_V, uniform, right=True)
    return torch.bincount(ids.clamp_(max=len(cumulative_V) - 1), minlength=len(cumulative_V))


def inclusion_probabilities(weights_V: Tensor, size: int) -> Tensor:
    """float64 [V]: chances in [0, 1] that add up to `size`, proportional to the weights but at most 1.

    The least variance that a sample of `size` can have for a sum of terms near these weights. 0 where the weight is 0;
    all others 1 when there are no more than `size` of them.
    """
    certain_V = torch.zeros_like(weights_V, dtype=torch.bool)
    while True:
        rest_V = weights_V.double().masked_fill(certain_V, 0.0)
        left, total = size - int(certain_V.sum()), rest_V.sum()
        if total == 0:
            return certain_V.double()
        chances_V = rest_V * (left / total)
        over_V = chances_V >= 1.0
        if not over_V.any():
            return chances_V + certain_V
        certain_V |= over_V


def systematic_sample(chances_V: Tensor, generator: torch.Generator) -> Tensor:
    """bool [V]: a sample whose size is the chances' sum (to the nearest whole) and that has each id with its chance.

    The chances are laid end to end in random order on a line; those that cover an integer, after a random shift, are
    chosen (Madow 1949).
    """
    chosen_V = chances_V >= 1.0
    open_ids = ((chances_V > 0) & ~chosen_V).nonzero().squeeze(1)
    open_ids = open_ids[torch.randperm(len(open_ids), generator=generator)]
    ends = chances_V[open_ids].cumsum(0) + torch.rand(1, generator=generator, dtype=torch.float64)
    teeth = ends.floor().diff(prepend=torch.zeros(1, dtype=torch.float64))
    chosen_V[open_ids[teeth > 0]] = True
    return chosen_V
