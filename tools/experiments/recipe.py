"""The recipe of a small decoder: its settings climbed one by one, by the same rule for headless and vanilla.

From what was found before, each of GRIDS is moved to a neighbouring value while held-out perplexity falls by more than
LEAST_GAIN; rounds over all settings follow each other until none moves, or ROUNDS are over. Then the first recipe and
the one found are trained with other seeds, and LONGER: what helps a short run need not help a long one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from pathlib import Path
from typing import Any

from experiments.laboratory import Laboratory
from experiments.measures import Row, over_seeds, speed
from megahead.errors import UserError
from megahead.report import read_metrics

OBJECTIVES = ("headless", "vanilla")
VOCABULARY = 16_384
"""The demo's."""

ROWS, SEQUENCE = 4_000, 256
"""Rows that every run of the search reads, of so many tokens: 1 M tokens, a hundredth of the verdict's."""

SEEDS = (0, 1, 2)
LONGER = 4
ROUNDS = 2
LEAST_GAIN = 0.005
"""Of perplexity; two seeds differ by about as much."""

Recipe = dict[str, Any]

START: Recipe = {
    "optimizer.learning_rate": 2e-3,
    "optimizer.table.learning_rate_ratio": 1,
    "model.init_embedding_std": 0.046,
    "batch.global_size": 16,
    "optimizer.weight_decay": 0.1,
    "optimizer.betas": "[0.9,0.95]",
    "schedule.name": "cosine",
    "optimizer.name": "adamw",
}
"""The demo's before the climb."""

GRIDS: dict[str, tuple[Any, ...]] = {
    "optimizer.learning_rate": (1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3),
    "model.init_embedding_std": (0.005, 0.01, 0.02, 0.046, 0.1),
    "optimizer.table.learning_rate_ratio": (0.25, 0.5, 1, 2, 4, 8, 16),
    "batch.global_size": (8, 16, 32),
    "objective.temperature": (0.5, 0.7, 1, 1.4),
    "objective.group_samples": (2, 4, 8, 16),
    "optimizer.weight_decay": (0, 0.03, 0.1, 0.3, 1),
    "optimizer.betas": ("[0.9,0.95]", "[0.9,0.98]"),
    "schedule.name": ("cosine", "wsd"),
    "optimizer.name": ("adamw", "muon"),
}
"""Values from one end to the other. Temperature and groups are the headless objective's alone."""

FIRST: Recipe = START | {"objective.temperature": 1, "objective.group_samples": 8}
"""With what only the headless objective has."""

_COMMON: Recipe = {
    "optimizer.weight_decay": 0.3,
    "optimizer.betas": "[0.9,0.98]",
    "optimizer.name": "muon",
}
_HEADLESS: Recipe = {
    "optimizer.learning_rate": 8e-3,
    "optimizer.table.learning_rate_ratio": 2,
    "objective.group_samples": 16,
}
FOUND: Mapping[str, Recipe] = {
    "headless": _COMMON | _HEADLESS,
    "vanilla": _COMMON | {"optimizer.learning_rate": 16e-3},
}
"""What climbs came to, the headless one from the demo's settings, the vanilla one from there; they go on from here."""


def compare_recipe(laboratory: Laboratory, only: Sequence[str]) -> None:
    """Climbs, for each objective or those of `only`, and holds what was found against the first recipe."""
    for objective in (name for name in OBJECTIVES if not only or name in only):
        start = FIRST if objective == "headless" else START
        climb = Climb(laboratory, objective, start | FOUND[objective])
        found = climb.to_the_top()
        laboratory.record(f"recipe-{objective}", climb.rows)
        laboratory.record(f"recipe-{objective}-held", _held(laboratory, objective, {"first": start, "found": found}))


@dataclass
class Climb:
    """One objective's way from `recipe` upwards; `rows` has every run, in their order."""

    laboratory: Laboratory
    objective: str
    recipe: Recipe
    rows: list[Row] = field(default_factory=list)
    known: dict[str, float] = field(default_factory=dict)
    """Perplexities by the run's name."""

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
                if not (_possible(tried) and self._gains(tried)):
                    break
                self.recipe = tried
            if self.recipe[setting] != before:
                return True
        return False

    def _gains(self, tried: Recipe) -> bool:
        return self._perplexity(tried) < self._perplexity(self.recipe) * (1 - LEAST_GAIN)

    def _perplexity(self, recipe: Recipe) -> float:
        """At the end of the run; infinite where it went astray."""
        name = f"{self.objective}-{_name(recipe)}"
        if name not in self.known:
            row = self._row(recipe, name)
            self.known[name] = row["perplexity"] if isfinite(row["perplexity"]) else inf
            self.rows.append({"objective": self.objective, **{key: str(value) for key, value in recipe.items()}, **row})
        return self.known[name]

    def _row(self, recipe: Recipe, name: str) -> Row:
        try:
            return _trained(self.laboratory, self.objective, name, recipe, seed=SEEDS[0], times=1)
        except UserError:
            if not _went_astray(self.laboratory.folder / name):
                raise
            return {"seed": SEEDS[0], "perplexity": inf}


def _went_astray(run: Path) -> bool:
    """Whether the run's last session was ended by steps whose loss was not finite, or far above what it had been."""
    try:
        events = read_metrics(run).events
    except UserError:
        return False
    began = max((place for place, event in enumerate(events) if "session" in event), default=0)
    return any(event.get("fault", {}).get("action") == "stop" for event in events[began:])


def _beyond(setting: str, value: Any, direction: int) -> Iterator[Any]:
    """The values of a grid behind `value`, seen in one direction."""
    grid = GRIDS[setting][::direction]
    return iter(grid[grid.index(value) + 1 :])


def _possible(recipe: Recipe) -> bool:
    """A group is no larger than the global batch."""
    return bool(recipe.get("objective.group_samples", 1) <= recipe["batch.global_size"])


def _name(recipe: Recipe) -> str:
    """What is not as at the start; `demo` if all is."""
    changed = [
        f"{key.removesuffix('.name').split('.')[-1]}-{value}" for key, value in recipe.items() if value != FIRST[key]
    ]
    return re.sub(r"[^\w.-]+", "_", "-".join(changed)) or "demo"


def settings_of(recipe: Recipe) -> list[str]:
    """As overrides of a config."""
    return [f"{key}={value}" for key, value in recipe.items()]


def _trained(laboratory: Laboratory, objective: str, name: str, recipe: Recipe, seed: int, times: int) -> Row:
    """The end of one run over `times` as many rows."""
    steps = ROWS * times // recipe["batch.global_size"]
    course = [f"training.steps={steps}", f"training.evaluate_every={steps}", f"training.checkpoint_every={steps}"]
    course += [f"schedule.warmup_steps={steps // 16}", f"seed={seed}", f"data.sequence_length={SEQUENCE}"]
    if recipe["schedule.name"] == "wsd":
        course.append(f"schedule.decay_steps={steps // 5}")
    run = laboratory.train(f"demo-{objective}", name, *laboratory.data(VOCABULARY), *settings_of(recipe), *course)
    last = run.validation[-1]
    scores = {key: last[key] for key in ("perplexity", "bits_per_byte", "accuracy")}
    return {"seed": seed, "tokens": run.training[-1]["tokens"], **scores, "tokens/s": speed(run)}


def _held(laboratory: Laboratory, objective: str, recipes: Mapping[str, Recipe]) -> list[Row]:
    """Both recipes over all seeds, and with the first over longer runs."""
    rows = []
    for which, recipe in recipes.items():
        for seed, times in [*((seed, 1) for seed in SEEDS), (SEEDS[0], LONGER)]:
            name = (
                f"{objective}-{_name(recipe)}" + (f"-seed{seed}" if seed else "") + (f"-x{times}" if times > 1 else "")
            )
            row = _trained(laboratory, objective, name, recipe, seed, times)
            rows.append({"objective": objective, "recipe": which, **row})
    return over_seeds(rows, ("objective", "recipe", "tokens"), ("perplexity", "bits_per_byte", "accuracy", "tokens/s"))
