"""The recipe of a small decoder and of a small encoder: settings climbed one by one (`climb.py`), by the same rule for
headless and vanilla.

From what was found before the climb goes on. Then the first recipe and the one found are trained with other seeds, and
LONGER: what helps a short run need not help a long one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from experiments.climb import Climb, Recipe
from experiments.laboratory import Laboratory
from experiments.measures import Row, over_seeds, speed
from megahead.errors import FieldError, UserError
from megahead.report import read_metrics

OBJECTIVES = ("headless", "vanilla")
SEEDS = (0, 1, 2)
LONGER = 4
SCORES = ("perplexity", "bits_per_byte", "accuracy")
"""Encoders have no bits per byte."""

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

FIRST: Recipe = START | {"objective.temperature": 1, "objective.group_samples": 8}
"""With what only the headless objective has."""

_COMMON: Recipe = {
    "optimizer.weight_decay": 0.3,
    "optimizer.betas": "[0.9,0.98]",
    "optimizer.name": "muon",
}
FOUND: Mapping[str, Recipe] = {
    "headless": _COMMON
    | {
        "optimizer.learning_rate": 8e-3,
        "optimizer.table.learning_rate_ratio": 2,
        "objective.group_samples": 16,
    },
    "vanilla": _COMMON | {"optimizer.learning_rate": 16e-3},
}
"""What climbs of decoders came to, the headless one from the demo's settings, the vanilla one from there."""

ENCODER_START: Recipe = START | {
    "model.init_embedding_std": 0.02,
    "batch.global_size": 32,
    "optimizer.weight_decay": 0.01,
    "optimizer.betas": "[0.9,0.98]",
    "schedule.name": "wsd",
}
"""Those of modernbert-15m before the climb."""

ENCODER_FOUND: Mapping[str, Recipe] = {
    "headless": _COMMON | {"optimizer.learning_rate": 8e-3, "model.init_embedding_std": 0.046},
    "vanilla": _COMMON
    | {
        "optimizer.learning_rate": 8e-3,
        "optimizer.table.learning_rate_ratio": 0.25,
        "model.init_embedding_std": 0.046,
        "optimizer.weight_decay": 0.1,
    },
}


@dataclass(frozen=True)
class Kind:
    """A small model that every run of a search trains on as many rows."""

    config: str
    """Of `configs/`, without its objective's name."""

    encoder: bool
    vocabulary: int
    shape: tuple[str, ...]
    rows: int
    least: Mapping[str, float]
    """Of settings, as a climb takes them."""

    start: Mapping[str, Recipe]
    """By objective, before any climb."""

    found: Mapping[str, Recipe]
    """What climbs came to; they go on from here."""

    def data(self, laboratory: Laboratory) -> list[str]:
        return laboratory.encoder_data(self.vocabulary) if self.encoder else laboratory.data(self.vocabulary)


KINDS = {
    "decoder": Kind(
        config="demo",
        encoder=False,
        vocabulary=16_384,
        shape=("data.sequence_length=256",),
        rows=4_000,
        least={},
        start={"headless": FIRST, "vanilla": START},
        found=FOUND,
    ),
    "encoder": Kind(
        config="modernbert-15m",
        encoder=True,
        vocabulary=8_192,
        shape=(
            *("model.num_layers=4", "model.hidden_size=128", "model.num_heads=2", "model.intermediate_size=256"),
            *("data.sequence_length=128", "data.isolate_documents=false", "model.local_window=256"),
            "batch.micro_size=32",
        ),
        rows=16_000,
        least={"batch.global_size": 32},  # a micro-batch, and a group of negatives
        start={
            "headless": ENCODER_START | {"objective.temperature": 1, "objective.group_samples": 32},
            "vanilla": ENCODER_START,
        },
        found=ENCODER_FOUND,
    ),
}
"""The demo's decoder, of 1 M tokens a run; a ModernBERT whose windows are as wide as its rows, of 2 M."""


def compare_recipe(laboratory: Laboratory, only: Sequence[str]) -> None:
    """Climbs, for the kinds and objectives of `only` or all, and holds what was found against the first recipe."""
    if unknown := [name for name in only if name not in KINDS and name not in OBJECTIVES]:
        raise FieldError("--only", f"name some of {', '.join([*KINDS, *OBJECTIVES])}", got=unknown[0])
    for kind in [name for name in KINDS if name in only] or KINDS:
        for objective in [name for name in OBJECTIVES if name in only] or OBJECTIVES:
            Search(laboratory, kind, objective).record()


@dataclass(frozen=True)
class Search:
    """For the recipe of a kind by one objective."""

    laboratory: Laboratory
    kind_name: str
    objective: str

    @property
    def kind(self) -> Kind:
        return KINDS[self.kind_name]

    @property
    def start(self) -> Recipe:
        return self.kind.start[self.objective]

    @property
    def title(self) -> str:
        """Of runs and records."""
        return self.objective if self.kind_name == "decoder" else f"{self.kind_name}-{self.objective}"

    def record(self) -> None:
        climb = Climb(self.start | self.kind.found[self.objective], self._tried, self.kind.least)
        found = climb.to_the_top()
        self.laboratory.record(f"recipe-{self.title}", [{"objective": self.objective, **row} for row in climb.rows])
        self.laboratory.record(f"recipe-{self.title}-held", self._held({"first": self.start, "found": found}))

    def _tried(self, recipe: Recipe) -> Row:
        """The end of a run, or an infinite perplexity where it went astray."""
        name = self._name(recipe)
        try:
            return self._trained(name, recipe, seed=SEEDS[0], times=1)
        except UserError:
            if not _went_astray(self.laboratory.folder / name):
                raise
            return {"seed": SEEDS[0], "perplexity": inf}

    def _held(self, recipes: Mapping[str, Recipe]) -> list[Row]:
        """Both recipes over all seeds, and with the first over longer runs."""
        rows = []
        for which, recipe in recipes.items():
            for seed, times in [*((seed, 1) for seed in SEEDS), (SEEDS[0], LONGER)]:
                name = self._name(recipe) + (f"-seed{seed}" if seed else "") + (f"-x{times}" if times > 1 else "")
                row = self._trained(name, recipe, seed, times)
                rows.append({"objective": self.objective, "recipe": which, **row})
        values = [value for value in (*SCORES, "tokens/s") if value in rows[0]]
        return over_seeds(rows, ("objective", "recipe", "tokens"), values)

    def _trained(self, name: str, recipe: Recipe, seed: int, times: int) -> Row:
        """The end of one run over `times` as many rows."""
        kind = self.kind
        steps = kind.rows * times // recipe["batch.global_size"]
        course = [f"training.steps={steps}", f"training.evaluate_every={steps}", f"training.checkpoint_every={steps}"]
        course += [f"schedule.warmup_steps={steps // 16}", f"seed={seed}"]
        course += [f"schedule.decay_steps={steps // 5 if recipe['schedule.name'] == 'wsd' else 'null'}"]
        given = [*kind.data(self.laboratory), *kind.shape, *settings_of(recipe), *course]
        run = self.laboratory.train(f"{kind.config}-{self.objective}", name, *given)
        last = run.validation[-1]
        told = {key: last[key] for key in SCORES if last[key] is not None}
        return {"seed": seed, "tokens": run.training[-1]["tokens"], **told, "tokens/s": speed(run)}

    def _name(self, recipe: Recipe) -> str:
        """What is not as at the start."""
        first = self.kind.start["headless"]
        changed = [
            f"{key.removesuffix('.name').split('.')[-1]}-{value}"
            for key, value in recipe.items()
            if value != first[key]
        ]
        return f"{self.title}-" + (re.sub(r"[^\w.-]+", "_", "-".join(changed)) or "first")


def _went_astray(run: Path) -> bool:
    """Whether the run's last session was ended by steps whose loss was not finite, or far above what it had been."""
    try:
        events = read_metrics(run).events
    except UserError:
        return False
    began = max((place for place, event in enumerate(events) if "session" in event), default=0)
    return any(event.get("fault", {}).get("action") == "stop" for event in events[began:])


def settings_of(recipe: Recipe) -> list[str]:
    """As overrides of a config."""
    return [f"{key}={value}" for key, value in recipe.items()]
