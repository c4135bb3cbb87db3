"""Which runs a verdict takes: a long one by each objective, and branches that end where a smaller budget is spent.

By a warmup-stable-decay schedule the learning rate falls in the last part of a budget alone, so that all budgets share
one run up to there: a branch goes on from its checkpoint. Budgets are units of time: a number of headless steps, and of
vanilla ones that take as long.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import gcd


@dataclass(frozen=True)
class Part:
    """Models of one shape."""

    shape: tuple[str, ...]
    budgets: Mapping[int, tuple[int, ...]]
    """By seed; multiples of 5, so that decays begin at a unit."""

    switches: Mapping[int, tuple[float, ...]]
    """By budget: shares of the time, the last ones, in which a headless run gets a softmax over the vocabulary."""

    kinds: tuple[str, ...] = ("headless", "vanilla", "switched")
    unit: int = 128
    """Headless steps."""

    config: str = "pythia-14m-headless"
    encoder: bool = False
    vocabulary: int = 49_152
    longer: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By objective: settings that suit runs of this length better than what a climb of short ones came to."""

    decay: float = 0.2
    """The last share of a budget, in which the learning rate falls."""

    vanilla_unit: int | None = None
    """Vanilla steps in a unit; None: as many as take the same time, which is measured."""


@dataclass(frozen=True)
class Course:
    """One run."""

    kind: str
    run: str
    """What it is told as."""

    budget: int
    objective: str
    """That it begins with."""

    steps: int
    decay_steps: int
    vanilla_steps: int = 0
    """The last ones, after a switch."""

    trunk: str | None = None
    """The name of the run that it goes on from, and at which of its steps."""

    fork: int = 0

    @property
    def name(self) -> str:
        return f"{self.run}-{self.budget}".replace(" ", "-").replace(",", "").replace("%", "")


class Courses:
    """Of one part and seed, where `vanilla_unit` vanilla steps take as long as a unit of headless ones."""

    def __init__(self, part: Part, seed: int, vanilla_unit: int) -> None:
        self.units = {"headless": part.unit, "vanilla": vanilla_unit}
        self._part, self._budgets, self._longest = part, part.budgets[seed], max(part.budgets[seed])

    def trunks(self) -> list[Course]:
        """The longest one of each objective: others go on from it."""
        return [self._plain(kind, self._longest) for kind in self.units]

    def all(self) -> list[Course]:
        """All runs, but for the kinds that the part leaves out."""
        plain = [self._plain(kind, budget) for kind in self.units for budget in self._budgets]
        switched = [
            self._switched(budget, share) for budget in self._budgets for share in self._part.switches.get(budget, ())
        ]
        equal_tokens = [self._equal_tokens(budget) for budget in self._budgets]
        differ = "vanilla" in self._part.kinds and self.units["headless"] != self.units["vanilla"]
        runs = [*plain, *(equal_tokens if differ else []), *switched]
        return [course for course in runs if course.kind in self._part.kinds]

    def kept_every(self, trunk: Course) -> int:
        """Steps between those checkpoints of a trunk that others go on from; 0 if none does."""
        return gcd(*(course.fork for course in self.all() if course.trunk == trunk.name))

    def warmup_steps(self, course: Course) -> int:
        """A unit of its trunk's, or a fifth of a run that is shorter than five."""
        unit = self.units[course.objective]
        return unit if course.trunk is not None else min(unit, course.steps // 5)

    def time_until(self, course: Course, step: int) -> float:
        """Units that a course has taken at one of its steps."""
        last = max(0, step - (course.steps - course.vanilla_steps))
        return (step - last) / self.units[course.objective] + last / self.units["vanilla"]

    def _plain(self, kind: str, budget: int) -> Course:
        unit, decay = self.units[kind], round(self._part.decay * budget)
        course = Course(kind, kind, budget, kind, steps=budget * unit, decay_steps=decay * unit)
        return course if budget == self._longest else self._branch(course)

    def _switched(self, budget: int, share: float) -> Course:
        unit = self.units["headless"]
        first, last = round(budget * (1 - share) * unit), max(1, round(budget * share * self.units["vanilla"]))
        falls = self._part.decay
        decay = round(last * falls / share) if share >= falls else last + round(budget * (falls - share) * unit)
        run = f"vanilla for the last {share:.0%}"
        return self._branch(Course("switched", run, budget, "headless", first + last, decay, vanilla_steps=last))

    def _equal_tokens(self, budget: int) -> Course:
        """Headless, on as many tokens as vanilla reads in the time of `budget`: cheaper than the other way round."""
        unit = self.units["vanilla"]
        steps, decay = budget * unit, round(self._part.decay * budget) * unit
        return self._branch(Course("headless", "headless, equal tokens", budget, "headless", steps, decay))

    def _branch(self, course: Course) -> Course:
        """It goes on from the trunk's last checkpoint up to where the rate or the objective changes in either, unless
        the trunk's warm-up would be most of it."""
        unit, stable = self.units[course.objective], self._longest - round(self._part.decay * self._longest)
        same = course.steps - max(course.decay_steps, course.vanilla_steps)
        fork = min(same // unit, stable) * unit
        trunk = self._plain(course.objective, self._longest).name
        return replace(course, trunk=trunk, fork=fork) if fork and 2 * unit <= course.steps else course
