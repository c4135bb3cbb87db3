"""What a masking strategy is: how a row is cut into units, and how likely each is selected.

A unit is a span of tokens that are masked together, all or none. B rows, T tokens per row, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, Self

import numpy as np

from megahead.data.counter_rng import CounterRng

Array = np.ndarray[Any, Any]


class Strategy(Protocol):
    """One way to cut rows into units."""

    def at(self, step: int) -> Strategy:
        """As it is for the rows of an optimizer step, counted by what was read."""
        ...

    def starts(self, tokens_BT: Array, noise: CounterRng) -> Array:
        """bool [B, T]: where a unit begins. Special tokens always end a unit."""
        ...

    def weights(self, tokens_BT: Array) -> Array | None:
        """float64 [B, T], above 0: how likely each token is selected, relative to the others; None: all alike."""
        ...


class Constant:
    """The same at every step."""

    def at(self, step: int) -> Self:
        return self


class AllAlike(Constant):
    """Units with the same chance, however they are cut."""

    def weights(self, tokens_BT: Array) -> Array | None:
        return None


@dataclass(frozen=True)
class WeighedIds(Constant):
    """Single tokens, each with the weight of its id."""

    weight_V: Array
    """float64 [V], above 0."""

    def starts(self, tokens_BT: Array, noise: CounterRng) -> Array:
        return np.ones(tokens_BT.shape, bool)

    def weights(self, tokens_BT: Array) -> Array | None:
        weights_BT: Array = self.weight_V[tokens_BT]
        return weights_BT


def no_longer_than(most: int, starts_BT: Array, whole_BT: Array | None = None) -> Array:
    """bool [B, T]: where units begin when those of more than `most` tokens are cut, each part as long as it may be. No
    part begins where `whole_BT` is set."""
    cut_BT = starts_BT.copy()
    cut_BT[:, 0] = True
    cut_M = cut_BT.reshape(-1)
    may_cut_M = np.ones(cut_M.size, bool) if whole_BT is None else ~whole_BT.reshape(-1)
    edges = np.append(np.flatnonzero(cut_M), cut_M.size)
    for unit in np.flatnonzero(np.diff(edges) > most):
        begin, end = edges[unit : unit + 2].tolist()
        places = begin + 1 + np.flatnonzero(may_cut_M[begin + 1 : end])
        for place, following in pairwise([*places.tolist(), end]):
            if following - begin > most:
                cut_M[place], begin = True, place
    return cut_BT
