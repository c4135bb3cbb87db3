"""The variants of the objective on one small decoder: same data, seed, tokens and steps; only `objective.*` differs.

Groups are multiples of a micro-batch (4 x 128 tokens); a step is 16 of them. Each model is scored on held-out text with
the head that its objective has without training, and with a head trained briefly with the body on top of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.laboratory import Laboratory
from experiments.measures import candidates, scores, speed

VARIANTS: dict[str, tuple[str, ...]] = {
    "paper": (),
    "paper, group 1/4": ("group_samples=1",),
    "paper, group 4": ("group_samples=16",),
    "paper, group 16": ("group_samples=64",),
    "once": ("bias=once",),
    "corrected": ("bias=corrected",),
    "corrected, group 16": ("bias=corrected", "group_samples=64"),
    "S_N 512": ("negatives=512",),
    "S_N 4096": ("negatives=4096",),
    "vanilla, tied": ("name=vanilla", "tied=true"),
    "vanilla": ("name=vanilla",),
    "capped at 512 of group 16": ("group_samples=64", "max_candidates=512"),
}

SEEDS = (1,)  # the default once more with each: how far apart equal runs are


def compare_variants(laboratory: Laboratory, only: Sequence[str]) -> None:
    """Trains and scores every variant (or those of `only`)."""
    rows = []
    for name, settings in VARIANTS.items():
        if not only or name in only:
            rows.append(_variant(laboratory, name, [f"objective.{setting}" for setting in settings]))
    if not only:
        rows += [_variant(laboratory, f"paper, seed {seed}", [f"seed={seed}"]) for seed in SEEDS]
    laboratory.record("variants", rows)


def _variant(laboratory: Laboratory, name: str, overrides: Sequence[str]) -> dict[str, Any]:
    folder = name.replace(", ", "-").replace(" ", "-").replace("/", "_")
    data = laboratory.data()
    run = laboratory.train("small-headless", folder, *data, *overrides)
    row = {"run": name, **scores(run, "own"), "tokens/s": speed(run), "candidates": candidates(run)}
    if run.validation[-1]["head"] == "trained":
        return row
    origin = f"init.from_checkpoint={laboratory.folder / folder}"
    head = laboratory.train("small-head", f"{folder}-head", *data, origin, *(one for one in overrides if "seed" in one))
    return row | scores(head, "trained")
