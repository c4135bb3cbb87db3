"""Uniform random numbers as a pure function of (seed, sample, purpose, place): the same on any mesh and machine.

A counter-based generator: SplitMix64 (Steele et al. 2014) of counters, for all B samples of a batch at once, W numbers
each. It has no state that draws would advance.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum, unique
from typing import Any

import numpy as np

from megahead.data.shuffle import GOLDEN, derive_seed, scramble

Array = np.ndarray[Any, Any]

_LEFT_OUT = np.uint64(11)  # of 64 bits, so that 53 are left, as many as a float64 has


@unique
class Purpose(IntEnum):
    """What random numbers decide. A number that runs have drawn by is never given to another purpose."""

    MASKING_ORDER = 1
    MASKING_TREATMENT = 2
    MASKING_REPLACEMENT = 3
    SPAN_LENGTHS = 17
    MASKED_INPUTS = 33
    DIFFUSION_SHARES = 41
    DIFFUSION_PLACES = 42
    REPLACED_TOKENS = 51
    DROPPING_TIES = 61


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

    def choice(self, purpose: int, allowed_BW: Array, count_B: Array, weight_BW: Array | None = None) -> Array:
        """bool [B, W]: so many of each row's allowed places (bool), drawn without replacement, each next one in
        proportion to the weights (above 0) of those that are left (exponential clocks); all alike without."""
        draw_BW = self.uniform(purpose, allowed_BW.shape[1])
        with np.errstate(over="ignore", divide="ignore"):
            clock_BW = draw_BW if weight_BW is None else -np.log(draw_BW) / weight_BW
        clock_BW = np.minimum(clock_BW, np.finfo(np.float64).max)  # of tiny weights, before places not allowed
        rank_BW = np.where(allowed_BW, clock_BW, np.inf).argsort(axis=1).argsort(axis=1)
        chosen_BW: Array = rank_BW < count_B[:, None]
        return chosen_BW


def _as_fraction(bits: Array) -> Array:
    fraction: Array = ((bits >> _LEFT_OUT).astype(np.float64) + 0.5) / 2.0**53
    return fraction
