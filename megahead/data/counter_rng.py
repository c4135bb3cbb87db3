"""Uniform random numbers as a pure function of (seed, sample, purpose, place): the same on any mesh and machine.

A counter-based generator: SplitMix64 (Steele et al. 2014) of counters, for all B samples of a batch at once, W numbers
each. It has no state that draws would advance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megahead.data.shuffle import GOLDEN, derive_seed, scramble

Array = np.ndarray[Any, Any]

_LEFT_OUT = np.uint64(11)  # of 64 bits, so that 53 are left, as many as a float64 has


class CounterRng:
    """The random numbers of some samples, independent between samples and between purposes (what they decide)."""

    def __init__(self, seed: int, sample_indices: Sequence[int] | Array) -> None:
        self._seed = seed
        self._samples_B = np.asarray(sample_indices, np.uint64)

    def uniform(self, purpose: int, width: int) -> Array:
        """float64 [B, width], each in (0, 1)."""
        key = np.uint64(derive_seed(self._seed, purpose))
        row_B = scramble(self._samples_B * np.uint64(GOLDEN) + key)
        place_W = np.arange(1, width + 1, dtype=np.uint64) * np.uint64(GOLDEN)
        return _as_fraction(scramble(row_B[:, None] + place_W))

    def spread(self, purpose: int) -> Array:
        """float64 [B], each in (0, 1); those of consecutive samples lie evenly, any number of them from any on.

        Steps of the golden ratio from a random beginning, modulo 1 (Weyl's sequence).
        """
        first = np.uint64(derive_seed(self._seed, purpose))
        return _as_fraction(self._samples_B * np.uint64(GOLDEN) + first)

    def choice(self, purpose: int, allowed_BW: Array, count_B: Array) -> Array:
        """bool [B, W]: so many of each row's allowed places (bool), drawn without replacement."""
        draw_BW = np.where(allowed_BW, self.uniform(purpose, allowed_BW.shape[1]), np.inf)
        rank_BW = draw_BW.argsort(axis=1).argsort(axis=1)
        chosen_BW: Array = rank_BW < count_B[:, None]
        return chosen_BW


def _as_fraction(bits: Array) -> Array:
    fraction: Array = ((bits >> _LEFT_OUT).astype(np.float64) + 0.5) / 2.0**53
    return fraction
