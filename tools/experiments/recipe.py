"""The recipes of small models: up a hill of settings, one after the other, by one list for all sides (`recipe.yaml`).

A setting takes every value of the list while the others stay as they are. The best one is kept if it gains more than
LEAST_GAIN of held-out perplexity, the mean over SEEDS; then it is the next side's turn, and the next setting's. What
was found is held against the first recipe with ENDS as seeds and on LONGER runs: what helps a short run need not help
a long one.
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

from experiments.measures import Row, over_seeds, spent
from experiments.runner import ExperimentRunner, course, settings_of
from megahead.errors import FieldError, UserError
from megahead.report.read import read_metrics

Recipe = dict[str, Any]

SEEDS = (0, 1)
ENDS = (0, 1, 2)
LONGER = 10
ROUNDS = 2  # over all settings, at most
LEAST_GAIN = 0.005  # of perplexity. Two seeds differ by two or three times as much: a single move may be chance.
SCORES = ("perplexity", "bits_per_byte", "accuracy")  # encoders have no bits per byte


@dataclass(frozen=True)
class Kind:
    """A small model that every run of a search trains on as many rows."""

    config: str
    encoder: bool
    vocabulary: int
    shape: Sequence[str]
    rows: int
    values: Mapping[str, Sequence[Any]]  # of each setting, in the order in which they are tried
    start: Recipe  # before any search, the headless side's with what it alone has
    found: Mapping[str, Recipe]  # by side: what searches came to, beside `start`; they go on from here

    def first(self, side: str) -> Recipe:
        """What `side` had before any search."""
        alone = () if side == "headless" else [name for name in self.start if name.startswith("objective.")]
        return {name: value for name, value in self.start.items() if name not in alone}

    def learns_by(self, side: str, recipe: Recipe) -> list[str]:
        """As overrides of any config, of which nothing remains in objective and optimizer."""
        return [f"objective={json.dumps(SIDES[side])}", "optimizer={}", *settings_of(recipe)]


_LIST = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
SIDES: dict[str, Row] = _LIST["sides"]  # the objective of each
KINDS = {name: Kind(**kind) for name, kind in _LIST["kinds"].items()}
FIRST = KINDS["decoder"].start


def compare_recipe(runner: ExperimentRunner, only: Sequence[str]) -> None:
    """Searches, for the kinds and sides of `only` or all, and holds what was found against the first recipe."""
    if unknown := [name for name in only if name not in KINDS and name not in SIDES]:
        raise FieldError("--only", f"name some of {', '.join([*KINDS, *SIDES])}", got=unknown[0])
    sides = [name for name in SIDES if name in only] or [*SIDES]
    for kind in [name for name in KINDS if name in only] or KINDS:
        searches = [CoordinateSearch(runner, kind, side) for side in sides]
        title = "-".join([f"recipe-{kind}", *(sides if len(sides) < len(SIDES) else [])])
        for search in searches:
            search.perplexity(search.recipe)  # where each begins is known first
        for _ in range(ROUNDS):
            before = [search.recipe for search in searches]
            for setting in KINDS[kind].values:
                for search in searches:
                    search.try_values(setting)
                runner.record(title, [row for search in searches for row in search.rows])
            if before == [search.recipe for search in searches]:
                break
        runner.record(f"{title}-held", [row for search in searches for row in search.held()])


@dataclass
class CoordinateSearch:
    """The way of one side from what was found before; `rows` has every run, in their order."""

    runner: ExperimentRunner
    kind_name: str
    side: str
    rows: list[Row] = field(default_factory=list)
    known: dict[tuple[tuple[str, Any], ...], float] = field(default_factory=dict)  # perplexities by the recipe

    def __post_init__(self) -> None:
        self.kind = KINDS[self.kind_name]
        self.recipe = self.kind.first(self.side) | self.kind.found[self.side]

    def try_values(self, setting: str) -> None:
        """Keeps the best value, if this side has such a setting."""
        if setting not in self.recipe:
            return
        tried = [_fitting(self.recipe | {setting: value}) for value in self.kind.values[setting]]
        best = min(tried, key=self.perplexity)
        if self.perplexity(best) < self.perplexity(self.recipe) * (1 - LEAST_GAIN):
            self.recipe = best

    def perplexity(self, recipe: Recipe) -> float:
        """The mean over SEEDS; infinite where a run went astray."""
        key = tuple(recipe.items())
        if key not in self.known:
            rows = [self._tried(recipe, seed) for seed in SEEDS]
            self.rows += rows
            self.known[key] = mean(row["perplexity"] if isfinite(row["perplexity"]) else inf for row in rows)
        return self.known[key]

    def held(self) -> list[Row]:
        """The first recipe and the one found, over all seeds of the ends, and with the first over longer runs."""
        rows = []
        for which, recipe in {"first": self.kind.first(self.side), "found": self.recipe}.items():
            for seed, times in [*((seed, 1) for seed in ENDS), (ENDS[0], LONGER)]:
                rows.append({"recipe": which, **self._trained(recipe, seed, self.kind.rows * times)})
        values = [value for value in SCORES if value in rows[0]]
        return over_seeds(rows, ("side", "recipe", "tokens"), values)

    def _tried(self, recipe: Recipe, seed: int) -> Row:
        """The end of a run, or an infinite perplexity where it went astray."""
        try:
            return self._trained(recipe, seed, self.kind.rows)
        except UserError:
            if not _went_astray(self.runner.folder / self._name(recipe, seed, self.kind.rows)):
                raise
            return {"side": self.side, "seed": seed, **recipe, "perplexity": inf}

    def _trained(self, recipe: Recipe, seed: int, data_rows: int) -> Row:
        """The end of one run."""
        steps, name = data_rows // recipe["batch.global_size"], self._name(recipe, seed, data_rows)
        decay = steps // 5 if recipe["schedule.name"] == "wsd" else "null"
        given = self.runner.data(self.kind.vocabulary, encoder=self.kind.encoder)
        given += [*self.kind.shape, *self.kind.learns_by(self.side, recipe)]
        given += settings_of({"schedule.warmup_steps": steps // 16, "schedule.decay_steps": decay, "seed": seed})
        run = self.runner.train(self.kind.config, name, *given, *course(steps))
        last, settings = run.validation[-1], {name: str(value) for name, value in recipe.items()}
        told = {key: last[key] for key in SCORES if last[key] is not None}
        told |= {"tokens": run.training[-1]["tokens"], "cpu_seconds": round(spent(run))}
        return {"side": self.side, "seed": seed, **settings, **told}

    def _name(self, recipe: Recipe, seed: int, data_rows: int) -> str:
        """What is not as at the start."""
        changed = [
            f"{key.removesuffix('.name').split('.')[-1]}-{value}"
            for key, value in recipe.items()
            if value != self.kind.start[key]
        ]
        parts = [self.kind_name, self.side, *changed, f"rows-{data_rows}", f"seed-{seed}"]
        return re.sub(r"[^\w.-]+", "_", "-".join(parts))


def _fitting(recipe: Recipe) -> Recipe:
    """With a candidate group no larger than the global batch."""
    group, batch = "objective.group_samples", recipe["batch.global_size"]
    return recipe | ({group: min(recipe[group], batch)} if group in recipe else {})


def _went_astray(run: Path) -> bool:
    """Whether the run's last session was ended by steps whose loss was not finite, or far above what it had been."""
    try:
        events = read_metrics(run).events
    except UserError:
        return False
    began = max((place for place, event in enumerate(events) if "session" in event), default=0)
    return any(event.get("fault", {}).get("action") == "stop" for event in events[began:])
