"""Finds a rank that is much slower than the others, although all of them take each step together.

Ranks wait for each other in every step, so that all steps take as long as the slowest rank's. What tells it apart is
its own computing, the forward passes, before it meets the others. (Ranks that share the computing of a forward pass,
those of a tensor group, and all of them at ZeRO 3, wait within it and look alike.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

WINDOW = 20
"""Steps after which ranks are compared, by their medians: single slow steps do not matter."""

_LEAST_SECONDS = 0.002
"""A step's difference that is worth a line."""


@dataclass(frozen=True)
class SlowRank:
    """Its forward passes of a step take `seconds`, the other ranks' `usual` (both medians)."""

    rank: int
    host: str
    seconds: float
    usual: float

    def sentence(self, step: int) -> str:
        return (
            f"step {step:,}: rank {self.rank} on {self.host} is slow: its forward passes take {self.seconds:.3g} s a "
            f"step, {self.seconds / self.usual:.1f} times as long as the other ranks', which wait for it"
        )


class Pace:
    """Compares ranks on `hosts`; one is slow when it takes `ratio` times as long as the median of the others."""

    def __init__(self, hosts: Sequence[str], ratio: float) -> None:
        self._hosts, self._ratio = hosts, ratio
        self._steps: list[Sequence[float]] = []
        self._told: int | None = None

    def after_step(self, forward_seconds: Sequence[float]) -> SlowRank | None:
        """`forward_seconds`: each rank's in this step. A slow rank at the end of a window, unless it was slow in the
        last one too."""
        self._steps.append(forward_seconds)
        if len(self._hosts) == 1 or len(self._steps) < WINDOW:
            return None
        usual = [median(times) for times in zip(*self._steps, strict=True)]
        self._steps.clear()
        slowest = max(range(len(usual)), key=usual.__getitem__)
        others = median(seconds for rank, seconds in enumerate(usual) if rank != slowest)
        slow = usual[slowest] > self._ratio * others and usual[slowest] - others > _LEAST_SECONDS
        told, self._told = self._told, slowest if slow else None
        return SlowRank(slowest, self._hosts[slowest], usual[slowest], others) if slow and told != slowest else None
