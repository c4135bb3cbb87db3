"""The charts of runs, for the PNG and for the page: a panel each, with a series for each run that has values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, isfinite
from typing import Any

import numpy as np

from megahead.config.auxiliary import CustomConfig
from megahead.config.objective import auxiliary_curves
from megahead.report.read import Record, Run

MAX_POINTS = 600
"""Most points of a line on the page; in longer logs each point is the mean of consecutive values."""

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

    def smoothed(self, values: Any) -> Any:
        """Means over a fiftieth of the run, where values are noisy; NaN where the value itself is."""
        if self.dots or self.exact:
            return values
        return np.where(np.isnan(values), np.nan, running_mean(values, ceil(len(values) / 100)))


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
    *(Panel(c.key, c.title, c.note, zero=c.zero, percent=c.percent) for c in auxiliary_curves()),
    Panel("mfu", "Model FLOPs utilisation", "share of the devices' peak", percent=True, zero=True),
)
GEOMETRY = (
    Panel("gradient_share", "Gradient that the head lets through", "of the loss's, by scores", percent=True, dots=True),
    Panel("output_rank", "Effective rank of outputs", "at most the width", zero=True, dots=True),
    Panel("embedding_rank", "Effective rank of the embedding", "at most the width", zero=True, dots=True),
    Panel("output_anisotropy", "Anisotropy of outputs", "mean cosine of two", dots=True),
    Panel("embedding_anisotropy", "Anisotropy of the embedding", "mean cosine of two rows", dots=True),
)


def column(records: Sequence[Record], name: str) -> Any:
    """One value a record; NaN where it is missing or not finite, so that the line breaks there."""
    values = np.array([np.nan if record.get(name) is None else record[name] for record in records], dtype=np.float64)
    return np.where(np.isfinite(values), values, np.nan)


def running_mean(values: Any, half_width: int) -> Any:
    """Mean of each value and the `half_width` values on either side (fewer at the ends), non-finite ones left out."""
    finite = np.isfinite(values)
    total = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    count = np.concatenate([[0], np.cumsum(finite)])
    here = np.arange(len(values))
    first, last = np.maximum(here - half_width, 0), np.minimum(here + half_width + 1, len(values))
    counted = count[last] - count[first]
    return np.where(counted > 0, (total[last] - total[first]) / np.maximum(counted, 1), np.nan)


# The panels of the page, with their numbers.


def build_panels(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The panels for which any run has values, in the order of the page; every number is finite or null."""
    drawn = [(panel, [run.metrics.validation for run in runs]) for panel in HELD_OUT]
    drawn += [(panel, [run.metrics.training for run in runs]) for panel in (*TRAINING, *_custom_panels(runs))]
    drawn += [(panel, [_along(run.metrics.tasks, panel.key) for run in runs]) for panel in _task_panels(runs)]
    drawn += [(panel, [run.geometry for run in runs]) for panel in GEOMETRY]
    built = []
    for panel, records in drawn:
        lines = [line for k, its in enumerate(records) if (line := _series(k, its, panel)) is not None]
        if lines:
            built.append({**vars(panel), "series": lines})
    return built


def _series(run: int, records: Sequence[Record], panel: Panel) -> dict[str, Any] | None:
    """The series of a run; None if it has no value. A vanilla run logs 0 candidates, which counts as no value."""
    y = column(records, panel.key)
    if panel.key == "candidates":
        y[y == 0] = np.nan
    if np.isnan(y).all():
        return None
    size = ceil(len(y) / MAX_POINTS)
    x = {name: _numbers(column(records, name)[size - 1 :: size]) for name in X_AXES}
    return {"run": run, "x": x, "y": _downsample(y, size), "mean": _downsample(panel.smoothed(y), size)}


def _downsample(values: Any, size: int) -> list[float | None]:
    """Means of `size` consecutive values, those that are not finite left out; an incomplete last group is dropped."""
    groups = values[: len(values) // size * size].reshape(-1, size)
    counted = np.isfinite(groups).sum(axis=1)
    return _numbers(np.where(counted > 0, np.nansum(groups, axis=1) / np.maximum(counted, 1), np.nan))


def _numbers(values: Any) -> list[float | None]:
    return [float(f"{value:.6g}") if isfinite(value) else None for value in values.tolist()]


def _custom_panels(runs: Sequence[Run]) -> Iterator[Panel]:
    """A panel for each number that an objective of one's own logged beside its loss."""
    own, known = f"{CustomConfig.metric}_", {panel.key for panel in TRAINING}
    for key in dict.fromkeys(key for run in runs for record in run.metrics.training for key in record):
        if key.startswith(own) and key not in known:
            yield Panel(key, f"Auxiliary: {key.removeprefix(own)}", "of an objective of one's own")


def _task_panels(runs: Sequence[Run]) -> Iterator[Panel]:
    """A panel for each metric of each task that any run evaluated while it trained."""
    for key in dict.fromkeys(key for run in runs for record in run.metrics.tasks for key in _flat(record)):
        yield Panel(key, key.replace("/", "  ·  "), log=key.endswith("perplexity"), dots=True)


def _along(tasks: Sequence[Record], key: str) -> list[Record]:
    return [{**{name: record[name] for name in X_AXES}, key: _flat(record).get(key)} for record in tasks]


def _flat(record: Record) -> dict[str, float]:
    found = record["tasks"].items()
    return {f"{task}/{metric}": score["value"] for task, metrics in found for metric, score in metrics.items()}
