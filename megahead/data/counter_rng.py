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
        bits_BW = scramble(row_B[:, None] + place_W)
        return ((bits_BW >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53
