"""Who keeps whose copy: each rank's keeper is a rank on the next node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Keepers:
    """The keepers of all ranks, given each rank's node."""

    nodes: Sequence[str]

    def of(self, rank: int) -> int | None:
        """Its keeper: ranks of a node are spread over those of the next; None where there is one node only."""
        names = list(dict.fromkeys(self.nodes))
        if len(names) == 1:
            return None
        here = names.index(self.nodes[rank])
        next_ones = self.on(names[(here + 1) % len(names)])
        return next_ones[self.on(names[here]).index(rank) % len(next_ones)]

    def wards(self, rank: int) -> list[int]:
        """Those whose keeper it is."""
        return [other for other in range(len(self.nodes)) if self.of(other) == rank]

    def count(self) -> int:
        """Of nodes."""
        return len(set(self.nodes))

    def on(self, node: str) -> list[int]:
        """The ranks there."""
        return [rank for rank, place in enumerate(self.nodes) if place == node]
