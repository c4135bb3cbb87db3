"""A shuffle of [0, n) that is computed, not stored: any place of the order in constant time and memory.

A Feistel network over the bits of the index is a bijection on [0, 2^bits), whatever its round function; results that
are n or more are sent through it again ("cycle walking") until they are below n. It uses integer arithmetic and the
constants below only, so the order depends on (n, seed) alone, on every machine. Changing anything here changes the
order of every run: another shuffle needs a new class beside this one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

ROUNDS = 8
SMALLEST_BITS = 6  # fewer bits can give too few permutations; for n below 64 there is more cycle walking instead
GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
MASK_64 = (1 << 64) - 1

FOR_ORDER, FOR_OFFSET, FOR_DATASET = 0, 1, 2
"""What a seed derived from a run's is for, as the last number: an epoch's order, where an epoch is cut, one dataset."""

Array = np.ndarray[Any, Any]


def derive_seed(*numbers: int) -> int:
    """64 well-mixed bits of `numbers` (SplitMix64's finaliser, chained): independent seeds for named purposes."""
    state = 0
    for number in numbers:
        state = (state + number + GOLDEN) & MASK_64
        state = ((state ^ (state >> 30)) * MIX_1) & MASK_64
        state = ((state ^ (state >> 27)) * MIX_2) & MASK_64
        state ^= state >> 31
    return state


class FeistelOrder:
    """A seeded bijection on [0, n): `order[k]` is the k-th item. Costs about 0.1 us an item in bulk."""

    def __init__(self, n: int, seed: int) -> None:
        if n < 1:
            raise ValueError(f"an order needs at least one item, but n is {n}")
        self.n, self.seed = n, seed
        bits = max((n - 1).bit_length(), SMALLEST_BITS)
        self._low_bits = np.uint64(bits // 2)
        self._low_mask = np.uint64((1 << (bits // 2)) - 1)
        self._high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
        self._keys = np.array([derive_seed(seed, n, turn) for turn in range(ROUNDS)], np.uint64)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, k: int) -> int:
        return int(self.take([k])[0])

    def take(self, places: ArrayLike) -> Array:
        """The items at `places` (each in [0, n)), int64 of the same shape."""
        places_K = np.asarray(places, np.int64)
        if places_K.size and (places_K.min() < 0 or places_K.max() >= self.n):
            raise IndexError(f"places must be in [0, {self.n})")
        items = self._permute(places_K.reshape(-1).astype(np.uint64))
        outside = np.flatnonzero(items >= self.n)
        while len(outside):
            items[outside] = self._permute(items[outside])
            outside = outside[items[outside] >= self.n]
        return items.astype(np.int64).reshape(places_K.shape)

    def _permute(self, numbers: Array) -> Array:
        """One pass through the network, a bijection on [0, 2^bits)."""
        low, high = numbers & self._low_mask, numbers >> self._low_bits
        for turn in range(0, ROUNDS, 2):
            high = high ^ (scramble(low + self._keys[turn]) & self._high_mask)
            low = low ^ (scramble(high + self._keys[turn + 1]) & self._low_mask)
        return (high << self._low_bits) | low


def scramble(numbers: Array) -> Array:
    """SplitMix64's finaliser on each of `numbers`, in place."""
    numbers ^= numbers >> np.uint64(30)
    numbers *= np.uint64(MIX_1)
    numbers ^= numbers >> np.uint64(27)
    numbers *= np.uint64(MIX_2)
    numbers ^= numbers >> np.uint64(31)
    return numbers
