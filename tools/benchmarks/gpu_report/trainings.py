"""Real trainings of both objectives side by side, at equal tokens and in equal time."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np

from megahead.report.read import RunMetrics, read_metrics

PREFIX = "train-"


def trainings_compared(folder: Path, measured: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each size of which `measured` has `train-SIZE-headless` and `train-SIZE-vanilla`, run in `folder`."""
    sizes = [name.removeprefix(PREFIX).removesuffix("-headless") for name in measured if name.endswith("-headless")]
    rows = []
    for size in sizes:
        names = [f"{PREFIX}{size}-{objective}" for objective in ("headless", "vanilla")]
        if names[1] in measured:
            rows.append({"model": size} | _compared(*(read_metrics(folder / "runs" / name) for name in names)))
    return rows


def _compared(headless: RunMetrics, vanilla: RunMetrics) -> dict[str, Any]:
    """Held-out perplexities where both have been, read off between evaluations."""
    row: dict[str, Any] = {}
    for axis, unit in (("tokens", "M tokens"), ("seconds", "s")):
        reached = min(run.validation[-1][axis] for run in (headless, vanilla))
        row[unit] = round(reached / (1e6 if axis == "tokens" else 1), 1)
        for name, run in (("headless", headless), ("vanilla", vanilla)):
            row[f"{name} after these {axis}"] = _perplexity_at(run, axis, reached)
    for name, run in (("headless", headless), ("vanilla", vanilla)):
        last = run.training[-1]
        row[f"{name}, tokens/s"] = round(last["tokens"] / last["seconds"])
        row |= {f"{name}, MFU": f"{last['mfu']:.1%}"} if "mfu" in last else {}
    return row


def _perplexity_at(run: RunMetrics, axis: str, place: float) -> float:
    places = [record[axis] for record in run.validation]
    losses = [log(record["perplexity"]) for record in run.validation]
    return exp(float(np.interp(place, places, losses)))
