"""Up a hill of settings: one after the other moves to a neighbouring value while held-out perplexity falls.

Each setting of GRIDS that a recipe has is moved as long as that gains more than LEAST_GAIN; rounds over all of them
follow each other until none moves, or ROUNDS are over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any

from experiments.measures import Row

Recipe = dict[str, Any]

ROUNDS = 2
LEAST_GAIN = 0.005
"""Of perplexity. Two seeds differ by two or three times as much: a single move may be chance."""

GRIDS: dict[str, tuple[Any, ...]] = {
    "optimizer.learning_rate": (1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3),
    "model.init_embedding_std": (0.005, 0.01, 0.02, 0.046, 0.1),
    "optimizer.table.learning_rate_ratio": (0.125, 0.25, 0.5, 1, 2, 4, 8, 16),
    "batch.global_size": (8, 16, 32, 64, 128),
    "objective.temperature": (0.5, 0.7, 1, 1.4),
    "objective.group_samples": (2, 4, 8, 16, 32, 64, 128),
    "optimizer.weight_decay": (0, 0.01, 0.03, 0.1, 0.3, 1),
    "optimizer.betas": ("[0.9,0.95]", "[0.9,0.98]"),
    "schedule.name": ("cosine", "wsd"),
    "optimizer.name": ("adamw", "muon"),
}
"""Values from one end to the other. Temperature and groups are the headless objective's alone."""


@dataclass
class Climb:
    """The way from `recipe` upwards by what runs of `train` reach; `rows` has every run, in their order."""

    recipe: Recipe
    train: Callable[[Recipe], Row]
    """A row with the `perplexity` that a recipe comes to; infinite where it went astray."""

    least: Mapping[str, float] = field(default_factory=dict)
    """Of a setting, where a grid goes on below what can be trained."""

    rows: list[Row] = field(default_factory=list)
    known: dict[tuple[tuple[str, Any], ...], float] = field(default_factory=dict)
    """Perplexities by the recipe."""

    def to_the_top(self) -> Recipe:
        for _ in range(ROUNDS):
            moved = [self._moved(setting) for setting in GRIDS if setting in self.recipe]
            if not any(moved):
                break
        return self.recipe

    def _moved(self, setting: str) -> bool:
        """Whether another value of `setting` is better; the best one is kept."""
        before = self.recipe[setting]
        for direction in (1, -1):
            for value in _beyond(setting, self.recipe[setting], direction):
                tried = self.recipe | {setting: value}
                if not (self._possible(tried) and self._gains(tried)):
                    break
                self.recipe = tried
            if self.recipe[setting] != before:
                return True
        return False

    def _possible(self, recipe: Recipe) -> bool:
        """No setting is below its least, and a group no larger than the global batch."""
        large = all(recipe[setting] >= least for setting, least in self.least.items())
        return large and bool(recipe.get("objective.group_samples", 1) <= recipe["batch.global_size"])

    def _gains(self, tried: Recipe) -> bool:
        return self._perplexity(tried) < self._perplexity(self.recipe) * (1 - LEAST_GAIN)

    def _perplexity(self, recipe: Recipe) -> float:
        key = tuple(recipe.items())
        if key not in self.known:
            row = self.train(recipe)
            self.known[key] = row["perplexity"] if isfinite(row["perplexity"]) else inf
            self.rows.append({**{name: str(value) for name, value in recipe.items()}, **row})
        return self.known[key]


def _beyond(setting: str, value: Any, direction: int) -> Iterator[Any]:
    """The values of a grid behind `value`, seen in one direction."""
    grid = GRIDS[setting][::direction]
    return iter(grid[grid.index(value) + 1 :])
