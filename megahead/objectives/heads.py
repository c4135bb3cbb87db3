"""The language-model head that a headless model has without training: `E h / T + log q`.

The contrastive optimum is o.e_v = log p(v | context) - log q(v) + const(context), pointwise mutual information
(PMI), q being the distribution of the targets it was trained against. Adding log q back gives log p(v | context).
"""

from __future__ import annotations

import torch
from torch import Tensor


def log_unigram(counts_V: Tensor, vocab_size: int, prior_counts_V: Tensor | None = None) -> Tensor:
    """log q over the first `vocab_size` ids, float32 and finite: the PMI head's bias.

    counts_V: int64 counts of the targets trained on (at least vocab_size long). Ids never seen yet are smoothed
    by `vocab_size` pseudo-observations, spread by `prior_counts_V + 1` (the whole dataset's counts), or evenly.
    """
    counts = counts_V[:vocab_size].double()
    prior = torch.ones_like(counts) if prior_counts_V is None else prior_counts_V[:vocab_size].double() + 1
    smoothed = counts + vocab_size * prior / prior.sum()
    return (smoothed.log() - smoothed.sum().log()).float()
