"""What masking selects: the units that a row falls into, and how likely each is.

Units are runs of tokens that are masked together, all or none. B rows, T tokens a row, V vocabulary.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from megahead.data.noise import Noise

Array = np.ndarray[Any, Any]


class Strategy(Protocol):
    """One way to cut rows into units."""

    def starts(self, tokens_BT: Array, noise: Noise) -> Array:
        """bool [B, T]: where a unit begins. Special tokens end a unit whatever is said here."""
        ...

    def weights(self, tokens_BT: Array) -> Array | None:
        """float64 [B, T], above 0: how likely each token is selected, relative to others; None: alike."""
        ...


class Uniform:
    """Single tokens, all alike (BERT)."""

    def starts(self, tokens_BT: Array, noise: Noise) -> Array:
        return np.ones(tokens_BT.shape, bool)

    def weights(self, tokens_BT: Array) -> None:
        return None
