"""What happens when: a script of faults that a seed decides, and nothing else, so that it can be gone on with later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

SECOND = 0.2
"""Share of events at which another fault comes before the run has recovered."""

SECOND_WITHIN = 12.0
"""Seconds."""


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong."""

    kind: str
    node: int

    after: float
    """Seconds since its event began."""

    lasts: float
    """Seconds, of what passes by itself."""

    chance: int
    """By which all else about it is decided."""


@dataclass(frozen=True)
class Event:
    """A fault, or two one soon after the other."""

    number: int

    pause: float
    """Seconds from the beginning of the event before."""

    faults: tuple[Fault, ...]


@dataclass(frozen=True)
class Script:
    """Rounds of events, in which each kind comes first once."""

    seed: int
    kinds: Mapping[str, tuple[float, float]]
    """How many seconds each may last, at least and at most."""

    alone: frozenset[str]
    """Kinds that come alone: another fault would hide whether they are found."""

    nodes: int

    every: float
    """Seconds from event to event, on average."""

    def event(self, number: int) -> Event:
        """The same whenever it is asked for."""
        in_round, place = divmod(number, len(self.kinds))
        kind = Random(f"{self.seed} round {in_round}").sample(sorted(self.kinds), len(self.kinds))[place]
        chance = Random(f"{self.seed} event {number}")
        faults = [self._fault(kind, 0.0, chance)]
        others = sorted(self.kinds.keys() - self.alone - {kind})
        if others and kind not in self.alone and chance.random() < SECOND:
            faults.append(self._fault(chance.choice(others), chance.uniform(0, SECOND_WITHIN), chance))
        return Event(number, self.every * chance.uniform(0.5, 1.5), tuple(faults))

    def _fault(self, kind: str, after: float, chance: Random) -> Fault:
        node, lasts = chance.randrange(self.nodes), chance.uniform(*self.kinds[kind])
        return Fault(kind, node, round(after, 2), round(lasts, 2), chance.getrandbits(31))
