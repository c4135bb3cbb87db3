"""How much of a text was said before, in runs of eight words.

Each run is hashed to 64 bits; words are lower-cased and stripped of everything but letters and digits, so that layout,
punctuation and quoting do not hide a copy.
"""

from __future__ import annotations

import re
import zlib

import numpy as np
import numpy.typing as npt

RUN = 8
_WORD = re.compile(r"[a-z0-9]+")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def runs_of(text: str) -> npt.NDArray[np.uint64]:
    """One hash for every run of eight consecutive words, repeats removed, sorted; empty for a shorter text."""
    words = np.array([zlib.crc32(word.encode()) for word in _WORD.findall(text.lower())], dtype=np.uint64)
    if len(words) < RUN:
        return np.empty(0, dtype=np.uint64)
    count = len(words) - RUN + 1
    hashes = np.zeros(count, dtype=np.uint64)
    for k in range(RUN):
        hashes = (hashes ^ words[k : k + count]) * _MULTIPLIER
        hashes ^= hashes >> np.uint64(29)
    return np.unique(hashes)


class SeenRuns:
    """The runs of every text added so far, as a filter of 2^29 bits (64 MiB): no more memory for more text.

    A run never added is reported as seen with probability (runs added) / 2^29: about 1 % for 40 MB of text.
    """

    BITS = 29

    def __init__(self) -> None:
        self._bits = np.zeros(1 << (self.BITS - 3), dtype=np.uint8)

    def add(self, runs: npt.NDArray[np.uint64]) -> None:
        """Remembers `runs`."""
        slots = runs >> np.uint64(64 - self.BITS)
        np.bitwise_or.at(self._bits, slots >> np.uint64(3), _bit(slots))

    def share_of(self, runs: npt.NDArray[np.uint64]) -> float:
        """The share of `runs` that was added before; 0 for none."""
        if not len(runs):
            return 0.0
        slots = runs >> np.uint64(64 - self.BITS)
        return float(np.mean((self._bits[slots >> np.uint64(3)] & _bit(slots)) != 0))


def _bit(slots: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint8]:
    return np.left_shift(np.uint8(1), (slots & np.uint64(7)).astype(np.uint8))
