"""Models on the harness's tasks, as rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from paper.laboratory import Laboratory
from paper.measures import Row


def score(laboratory: Laboratory, name: str, what: Sequence[str], models: Sequence[str]) -> list[Row]:
    """The entries of `folder`/NAME.json for `models`, by the harness where they are missing."""
    output = laboratory.folder / f"{name}.json"
    laboratory.run("eval_harness.py", *what, "--output", str(output), "--model", *models)
    entries: list[Row] = json.loads(output.read_text())["results"]
    return [entry for model in models for entry in entries if entry["model"] == model]


def scores_of(entry: Row) -> Row:
    """Metric to value, and `± METRIC` to its standard error."""
    values = {score["metric"]: score["value"] for score in entry["scores"]}
    return values | {f"± {score['metric']}": score["stderr"] for score in entry["scores"]}


def beside(entries: Sequence[Row]) -> list[Row]:
    """A row for each metric of a task, a column for each model."""
    rows: dict[tuple[str, str], Row] = {}
    for entry in entries:
        for score in entry["scores"]:
            names = {"task": entry["task"], "metric": score["metric"]}
            row = rows.setdefault((entry["task"], score["metric"]), names)
            row[Path(entry["model"]).name] = f"{score['value']:.4g} ± {score['stderr']:.2g}"
    return list(rows.values())
