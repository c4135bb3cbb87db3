"""The data of the page's charts: panels, each with one series per run, as plain JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, isfinite
from typing import Any

import numpy as np

from megahead.report.curves import running_mean
from megahead.report.metrics import Record
from megahead.report.runs import Run

MAX_POINTS = 600
"""Most points of a line; in longer logs each point is the mean of consecutive values."""

X_AXES = ("tokens", "step", "seconds")


@dataclass(frozen=True)
class Panel:
    """One chart: what it is called, and how its values are shown."""

    key: str
    title: str
    note: str = ""
    log: bool = False
    zero: bool = False
    """The axis begins at 0."""
    percent: bool = False
    dots: bool = False
    """Whether to draw single points, for few values (evaluations), instead of many noisy ones."""
    exact: bool = False
    """Whether values have no noise that should be smoothed."""


HELD_OUT = (
    Panel("perplexity", "Held-out perplexity", "comparable between runs of one tokenizer", log=True, dots=True),
    Panel("bits_per_byte", "Held-out bits per byte", "comparable between tokenizers", dots=True),
    Panel("accuracy", "Next token right", "share of held-out targets", percent=True, dots=True),
)
TRAINING = (
    Panel("loss", "Training loss", "each run's own objective: headless and vanilla are not comparable"),
    Panel("gradient_norm", "Gradient norm", "before clipping", log=True),
    Panel("learning_rate", "Learning rate", zero=True, exact=True),
    Panel("tokens_per_second", "Tokens per second", "while training, all ranks together", zero=True),
    Panel("candidates", "Candidates", "ids an output is compared with", zero=True),
    Panel("generator_loss", "Generator's loss", "of masked tokens, where some are replaced"),
    Panel("detection_loss", "Detection loss", "of whether a token was replaced", zero=True),
    Panel("detection_found", "Replaced tokens found", "share of them", percent=True, zero=True),
    Panel("phrase_loss", "Phrase loss", "at the ends of masked phrases"),
    Panel("phrase_found", "Masked phrases found", "share of their ends", percent=True, zero=True),
    Panel("mfu", "Model FLOPs utilisation", "share of the devices' peak", percent=True, zero=True),
)
GEOMETRY = (
    Panel("gradient_share", "Gradient that the head lets through", "of the loss's, by scores", percent=True, dots=True),
    Panel("output_rank", "Effective rank of outputs", "at most the width", zero=True, dots=True),
    Panel("embedding_rank", "Effective rank of the embedding", "at most the width", zero=True, dots=True),
    Panel("output_anisotropy", "Anisotropy of outputs", "mean cosine of two", dots=True),
    Panel("embedding_anisotropy", "Anisotropy of the embedding", "mean cosine of two rows", dots=True),
)


def build_panels(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The panels for which any run has values, in the order of the page; every number is finite or null."""
    drawn = [(panel, [run.metrics.validation for run in runs]) for panel in HELD_OUT]
    drawn += [(panel, [run.metrics.training for run in runs]) for panel in TRAINING]
    drawn += [(panel, [_along(run.metrics.tasks, panel.key) for run in runs]) for panel in _task_panels(runs)]
    drawn += [(panel, [run.geometry for run in runs]) for panel in GEOMETRY]
    built = []
    for panel, records in drawn:
        lines = [_series(k, lines, panel) for k, lines in enumerate(records)]
        lines = [line for line in lines if line is not None]
        if lines:
            built.append({**vars(panel), "series": lines})
    return built


def _series(run: int, records: Sequence[Record], panel: Panel) -> dict[str, Any] | None:
    """The series of a run; None if it has no value. A vanilla run logs 0 candidates, which counts as no value."""
    values = [record.get(panel.key) for record in records]
    if panel.key == "candidates":
        values = [value or None for value in values]
    if not any(value is not None and isfinite(value) for value in values):
        return None
    y = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    y[~np.isfinite(y)] = np.nan
    x = {name: np.array([record[name] for record in records], dtype=np.float64) for name in X_AXES}
    mean = y if panel.dots or panel.exact else np.where(np.isnan(y), np.nan, running_mean(y, ceil(len(y) / 100)))
    size = ceil(len(y) / MAX_POINTS)
    return {
        "run": run,
        "x": {name: _numbers(values[size - 1 :: size]) for name, values in x.items()},
        "y": _thin(y, size),
        "mean": _thin(mean, size),
    }


def _thin(values: Any, size: int) -> list[float | None]:
    """Means of `size` consecutive values, those that are not finite left out; an incomplete last group is dropped."""
    groups = values[: len(values) // size * size].reshape(-1, size)
    counted = np.isfinite(groups).sum(axis=1)
    return _numbers(np.where(counted > 0, np.nansum(groups, axis=1) / np.maximum(counted, 1), np.nan))


def _numbers(values: Any) -> list[float | None]:
    return [float(f"{value:.6g}") if isfinite(value) else None for value in values.tolist()]


def _task_panels(runs: Sequence[Run]) -> Iterator[Panel]:
    """A panel for each metric of each task that any run evaluated while it trained."""
    for key in dict.fromkeys(key for run in runs for record in run.metrics.tasks for key in _flat(record)):
        yield Panel(key, key.replace("/", "  ·  "), log=key.endswith("perplexity"), dots=True)


def _along(tasks: Sequence[Record], key: str) -> list[Record]:
    return [{**{name: record[name] for name in X_AXES}, key: _flat(record).get(key)} for record in tasks]


def _flat(record: Record) -> dict[str, float]:
    found = record["tasks"].items()
    return {f"{task}/{metric}": score["value"] for task, metrics in found for metric, score in metrics.items()}
