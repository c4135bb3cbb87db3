"""The learning rates of all applied steps. Embedding rows that some of them did not update need these to catch up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_STEADY = 2.0
"""If the rates of two neighbouring steps differ by more than this factor, that is a jump; else they change smoothly."""


class PerStep:
    """Numbers, or rows of them, one for each step; appending is cheap. `first` is that of step 0."""

    def __init__(self, first: Any) -> None:
        self._room = np.array([first])
        self._length = 1

    def __len__(self) -> int:
        return self._length

    @property
    def values(self) -> NDArray[Any]:
        """All so far, as a view."""
        return self._room[: self._length]

    def extend(self, values: NDArray[Any]) -> None:
        """Appends `values`, one for each further step."""
        needed = self._length + len(values)
        if needed > len(self._room):
            more = max(needed, 2 * len(self._room)) - len(self._room)
            self._room = np.concatenate([self._room, np.zeros((more, *self._room.shape[1:]), self._room.dtype)])
        self._room[self._length : needed] = values
        self._length = needed


class RateHistory:
    """What happened at each applied step, in float64. Steps count from 1; number 0 stands for the beginning."""

    def __init__(self, weight_decay: float, rates: Sequence[float] | Floats = ()) -> None:
        self._weight_decay = weight_decay
        self._rates, self._log_kept, self._jumps = PerStep(0.0), PerStep(0.0), PerStep(0)
        self.extend(np.asarray(rates, np.float64))

    @property
    def steps(self) -> int:
        """Steps applied so far."""
        return len(self._rates) - 1

    @property
    def rates(self) -> Floats:
        """[steps]: the learning rate of each."""
        return self._rates.values[1:].copy()

    def push(self, rate: float) -> None:
        """One more step was applied, at this rate."""
        self.extend(np.array([rate]))

    def extend(self, rates: Floats) -> None:
        """More steps were applied, at these rates."""
        before = np.concatenate([self._rates.values[-1:], rates[:-1]])[: len(rates)]
        kept = (1 - rates * self._weight_decay).astype(np.float32).astype(np.float64)  # rounded where torch rounds it
        steps_apart = np.maximum(rates, before) > _STEADY * np.minimum(rates, before)
        _accumulate(self._jumps, steps_apart)
        _accumulate(self._log_kept, np.log(kept))
        self._rates.extend(rates)

    def rate(self, steps: Any) -> Any:
        """Rates of these steps."""
        return self._rates.values[steps]

    def kept(self, since: Any, until: Any) -> Any:
        """What weight decay leaves of a weight between two steps: prod of 1 - rate * decay over since + 1 .. until."""
        log_kept = self._log_kept.values
        return np.exp(log_kept[until] - log_kept[since])

    def jumps(self, since: Any, until: Any) -> Any:
        """How often the rate jumped over since + 1 .. until, each against the step before."""
        jumps = self._jumps.values
        return jumps[until] - jumps[since]


def _accumulate(sums: PerStep, more: NDArray[Any]) -> None:
    """Continues a running sum. Rounding is the same whether values are added one at a time or together."""
    sums.extend(np.cumsum(np.concatenate([sums.values[-1:], more]))[1:])
