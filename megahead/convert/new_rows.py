"""Rows for the tokens of a new vocabulary that the old one lacks: a method is a function here and a line in METHODS.

V old ids, n new tokens, D features (1 for a bias).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_RARITY = 1e-3  # of Arora et al.: a piece of this frequency weighs half of one that never occurs
_TOKENS_AT_ONCE = 4096

Pieces = Sequence[Sequence[int]]
Method = Callable[[Tensor, Pieces, Tensor | None, torch.Generator], Tensor]
"""From the old table [V, D] in fp32, each token's pieces, counts of old ids [V] and random numbers to rows [n, D]."""


def mean_rows(old_VD: Tensor, pieces: Pieces, counts_V: Tensor | None, generator: torch.Generator) -> Tensor:
    """The mean of the pieces' rows; drawn where there is none.

    Gee et al. 2022, "Fast Vocabulary Transfer for Language Model Compression", arXiv 2402.09977.
    """
    return _weighted(old_VD, pieces, torch.ones(len(old_VD), dtype=torch.float64), generator)


def rarity_rows(old_VD: Tensor, pieces: Pieces, counts_V: Tensor | None, generator: torch.Generator) -> Tensor:
    """The mean with weights a / (a + p), p a piece's frequency: rare pieces say more; drawn where there is none.

    Arora, Liang, Ma 2017, "A Simple but Tough-to-Beat Baseline for Sentence Embeddings", ICLR (SIF).
    """
    assert counts_V is not None
    shares_V = (counts_V.double() + 1) / (counts_V.double() + 1).sum()
    return _weighted(old_VD, pieces, _RARITY / (_RARITY + shares_V), generator)


def random_rows(old_VD: Tensor, pieces: Pieces, counts_V: Tensor | None, generator: torch.Generator) -> Tensor:
    """Drawn from a normal distribution with the mean and the deviation that each feature has in the old table.

    Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models" (its covariance without what is off
    the diagonal).
    """
    deviation_D, mean_D = torch.std_mean(old_VD, dim=0, correction=0)
    return torch.randn(len(pieces), old_VD.shape[1], generator=generator) * deviation_D + mean_D


METHODS: dict[str, Method] = {"mean": mean_rows, "rarity": rarity_rows, "random": random_rows}
NEED_COUNTS = frozenset({"rarity"})


def _weighted(old_VD: Tensor, pieces: Pieces, weight_V: Tensor, generator: torch.Generator) -> Tensor:
    """Means of the pieces' rows, exact to float32."""
    rows_nD = random_rows(old_VD, pieces, None, generator)
    said = [token for token, ids in enumerate(pieces) if ids]
    for first in range(0, len(said), _TOKENS_AT_ONCE):
        tokens = said[first : first + _TOKENS_AT_ONCE]
        ids = torch.tensor([id_ for token in tokens for id_ in pieces[token]])
        lengths = torch.tensor([len(pieces[token]) for token in tokens])
        of_token = torch.arange(len(tokens)).repeat_interleave(lengths)
        sums = torch.zeros(len(tokens), old_VD.shape[1], dtype=torch.float64)
        sums.index_add_(0, of_token, old_VD[ids].double() * weight_V[ids, None])
        totals = torch.zeros(len(tokens), dtype=torch.float64).index_add_(0, of_token, weight_V[ids])
        rows_nD[torch.tensor(tokens)] = (sums / totals[:, None]).float()
    return rows_nD
