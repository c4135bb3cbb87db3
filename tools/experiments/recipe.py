"""Recipes of small models by coordinate search, with the same values for all sides (objectives) in `recipe.yaml`.

Each setting in turn takes every value of its list, with the others fixed. The best value is kept if it improves
held-out perplexity, the mean over SEEDS, by more than MIN_GAIN; then the next side and the next setting follow. The
recipe found is compared with the initial one with FINAL_SEEDS, and on runs longer by LONG_RUN_FACTOR: what helps a
short run need not help a long one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from pathlib import Path
from statistics import mean
from typing import Any

import yaml

from experiments.measures import Row, aggregate_seeds, time_spent
from experiments.runner import ExperimentRunner, select_names, to_overrides, training_overrides
from megahead.errors import UserError
from megahead.report.read import read_metrics

Recipe = dict[str, Any]

SEEDS = (0, 1)
FINAL_SEEDS = (0, 1, 2)
LONG_RUN_FACTOR = 10
ROUNDS = 2  # over all settings, at most
MIN_GAIN = 0.005  # relative, of perplexity; two seeds differ by two or three times as much: a gain may be chance
SCORES = ("perplexity", "bits_per_byte", "accuracy")  # encoders have no bits per byte


@dataclass(frozen=True)
class Kind:
    """A small model, which every run of a search trains on the same number of rows."""

    config: str
    encoder: bool
    vocabulary: int
    shape: Sequence[str]
    rows: int
    values: Mapping[str, Sequence[Any]]  # by setting, in search order
    start: Recipe  # before any search, with the headless side's own settings
    found: Mapping[str, Recipe]  # by side: changes to `start` that earlier searches found; a search starts there

    def initial_recipe(self, side: str) -> Recipe:
        """The recipe of `side` before any search."""
        headless_only = () if side == "headless" else [name for name in self.start if name.startswith("objective.")]
        return {name: value for name, value in self.start.items() if name not in headless_only}

    def objective_overrides(self, side: str, recipe: Recipe) -> list[str]:
        """Overrides that replace the objective and optimizer of any config."""
        return [f"objective={json.dumps(SIDES[side])}", "optimizer={}", *to_overrides(recipe)]


_RECIPES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
SIDES: dict[str, Row] = _RECIPES["sides"]  # objective settings by side
KINDS = {name: Kind(**kind) for name, kind in _RECIPES["kinds"].items()}
INITIAL_RECIPE = KINDS["decoder"].start


def compare_recipe(runner: ExperimentRunner, only: Sequence[str]) -> None:
    """Searches recipes for the kinds and sides of `only`, or all, and compares them with the initial ones."""
    kinds, sides = select_names(only, KINDS, SIDES)
    for kind in kinds:
        searches = [CoordinateSearch(runner, kind, side) for side in sides]
        title = "-".join([f"recipe-{kind}", *(sides if len(sides) < len(SIDES) else [])])
        for search in searches:
            search.perplexity(search.recipe)  # the starting point comes first
        for _ in range(ROUNDS):
            before = [search.recipe for search in searches]
            for setting in KINDS[kind].values:
                for search in searches:
                    search.try_values(setting)
                runner.record(title, [row for search in searches for row in search.rows])
            if before == [search.recipe for search in searches]:
                break
        runner.record(f"{title}-held", [row for search in searches for row in search.compare_with_initial()])


@dataclass
class CoordinateSearch:
    """The search of one side, starting at what was found before; `rows` has every run, in order."""

    runner: ExperimentRunner
    kind_name: str
    side: str
    rows: list[Row] = field(default_factory=list)
    perplexity_by_recipe: dict[Any, float] = field(default_factory=dict)  # keys: items of the recipe

    def __post_init__(self) -> None:
        self.kind = KINDS[self.kind_name]
        self.recipe = self.kind.initial_recipe(self.side) | self.kind.found[self.side]

    def try_values(self, setting: str) -> None:
        """Tries all values of a setting, and keeps the best, if this side has the setting."""
        if setting not in self.recipe:
            return
        recipes = [_limit_group(self.recipe | {setting: value}) for value in self.kind.values[setting]]
        best = min(recipes, key=self.perplexity)
        if self.perplexity(best) < self.perplexity(self.recipe) * (1 - MIN_GAIN):
            self.recipe = best

    def perplexity(self, recipe: Recipe) -> float:
        """The mean over SEEDS; infinite if a run diverged."""
        key = tuple(recipe.items())
        if key not in self.perplexity_by_recipe:
            rows = [self._train_or_diverge(recipe, seed) for seed in SEEDS]
            self.rows += rows
            perplexities = [row["perplexity"] for row in rows]
            self.perplexity_by_recipe[key] = mean(perplexities) if all(map(isfinite, perplexities)) else inf
        return self.perplexity_by_recipe[key]

    def compare_with_initial(self) -> list[Row]:
        """Rows of the initial recipe and the one found: over FINAL_SEEDS, and of a longer run of the first seed."""
        rows = []
        for label, recipe in {"first": self.kind.initial_recipe(self.side), "found": self.recipe}.items():
            for seed, factor in [*((seed, 1) for seed in FINAL_SEEDS), (FINAL_SEEDS[0], LONG_RUN_FACTOR)]:
                rows.append({"recipe": label, **self._train(recipe, seed, self.kind.rows * factor)})
        values = [value for value in SCORES if value in rows[0]]
        return aggregate_seeds(rows, ("side", "recipe", "tokens"), values)

    def _train_or_diverge(self, recipe: Recipe, seed: int) -> Row:
        """The row of a run, with infinite perplexity if it diverged."""
        try:
            return self._train(recipe, seed, self.kind.rows)
        except UserError:
            if not _has_diverged(self.runner.folder / self._run_name(recipe, seed, self.kind.rows)):
                raise
            return {"side": self.side, "seed": seed, **recipe, "perplexity": inf}

    def _train(self, recipe: Recipe, seed: int, data_rows: int) -> Row:
        """Trains a run; returns its row."""
        steps, name = data_rows // recipe["batch.global_size"], self._run_name(recipe, seed, data_rows)
        decay = steps // 5 if recipe["schedule.name"] == "wsd" else "null"
        overrides = self.runner.data(self.kind.vocabulary, encoder=self.kind.encoder)
        overrides += [*self.kind.shape, *self.kind.objective_overrides(self.side, recipe)]
        overrides += to_overrides({"schedule.warmup_steps": steps // 16, "schedule.decay_steps": decay, "seed": seed})
        run = self.runner.train(self.kind.config, name, *overrides, *training_overrides(steps))
        last, settings = run.validation[-1], {name: str(value) for name, value in recipe.items()}
        scores = {key: last[key] for key in SCORES if last[key] is not None}
        scores |= {"tokens": run.training[-1]["tokens"], "cpu_seconds": round(time_spent(run))}
        return {"side": self.side, "seed": seed, **settings, **scores}

    def _run_name(self, recipe: Recipe, seed: int, data_rows: int) -> str:
        """A name from the settings that differ from the start."""
        changed = {key: value for key, value in recipe.items() if value != self.kind.start[key]}
        settings = [f"{key.removesuffix('.name').split('.')[-1]}-{value}" for key, value in changed.items()]
        parts = [self.kind_name, self.side, *settings, f"rows-{data_rows}", f"seed-{seed}"]
        return re.sub(r"[^\w.-]+", "_", "-".join(parts))


def _limit_group(recipe: Recipe) -> Recipe:
    """Limits the candidate group to the global batch size."""
    group, batch = "objective.group_samples", recipe["batch.global_size"]
    return recipe | ({group: min(recipe[group], batch)} if group in recipe else {})


def _has_diverged(run: Path) -> bool:
    """Whether the run's last session was stopped because its loss was not finite or had spiked."""
    try:
        events = read_metrics(run).events
    except UserError:
        return False
    session_start = max((index for index, event in enumerate(events) if "session" in event), default=0)
    return any(event.get("fault", {}).get("action") == "stop" for event in events[session_start:])
