"""The charts of runs, for the PNG and for the page: a panel each, with a series for each run that has values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, isfinite
from typing import Any

import numpy as np

from megahead.config.auxiliaries import CustomConfig
from megahead.config.objective import auxiliary_curves
from megahead.report.read import Record, Run

MAX_POINTS = 600
"""Limit on the points of a line on the page; in longer logs each point is the mean of consecutive values."""

X_AXES = ("tokens", "step", "seconds")


@dataclass(frozen=True)
class Panel:
    """One chart of the page or the PNG."""

    key: str
    title: str
    note: str = ""
    log_scale: bool = False
    from_zero: bool = False
    """Whether the axis starts at 0."""
    percent: bool = False
    dots: bool = False
    """Whether to mark each value, since there are few (evaluations)."""
    noise_free: bool = False
    """Whether values are free of noise, and not smoothed."""

    def smoothed(self, values: Any) -> Any:
        """The running mean over a fiftieth of the run if values are noisy; NaN where the value is NaN."""
        if self.dots or self.noise_free:
            return values
        return np.where(np.isnan(values), np.nan, running_mean(values, ceil(len(values) / 100)))


HELD_OUT = (
    Panel("perplexity", "Held-out perplexity", "comparable between runs of one tokenizer", log_scale=True, dots=True),
    Panel("bits_per_byte", "Held-out bits per byte", "comparable between tokenizers", dots=True),
    Panel("accuracy", "Accuracy", "share of held-out targets predicted right", percent=True, dots=True),
)
TRAINING = (
    Panel("loss", "Training loss", "each run's own objective: headless and vanilla are not comparable"),
    Panel("gradient_norm", "Gradient norm", "before clipping", log_scale=True),
    Panel("learning_rate", "Learning rate", from_zero=True, noise_free=True),
    Panel("tokens_per_second", "Tokens per second", "while training, all ranks together", from_zero=True),
    Panel("candidates", "Candidates", "ids an output is compared with", from_zero=True),
    *(Panel(c.key, c.title, c.note, from_zero=c.from_zero, percent=c.percent) for c in auxiliary_curves()),
    Panel("mfu", "Model FLOPs utilisation", "share of the devices' peak", percent=True, from_zero=True),
)
# gradient_share: of the loss's gradient w.r.t. the scores, the part that the rows pass on to the outputs; the rest is
# lost, since D features are fewer than candidates (evaluate/geometry.py measures these).
GEOMETRY = (
    Panel(
        "gradient_share",
        "Gradient that reaches the outputs",
        "share of its squared norm",
        percent=True,
        dots=True,
    ),
    Panel("output_rank", "Effective rank of outputs", "at most the width", from_zero=True, dots=True),
    Panel("embedding_rank", "Effective rank of the embedding", "at most the width", from_zero=True, dots=True),
    Panel("output_anisotropy", "Anisotropy of outputs", "mean cosine of two", dots=True),
    Panel("embedding_anisotropy", "Anisotropy of the embedding", "mean cosine of two rows", dots=True),
)


def column(records: Sequence[Record], name: str) -> Any:
    """The values of `name`, float64 of shape [records]; NaN (a gap in the line) if missing or not finite."""
    values = np.array([np.nan if record.get(name) is None else record[name] for record in records], dtype=np.float64)
    return np.where(np.isfinite(values), values, np.nan)


def running_mean(values: Any, half_width: int) -> Any:
    """Mean of each value and its `half_width` neighbours on each side (fewer at the ends), ignoring non-finite ones."""
    if not len(values):  # which numpy does not convolve
        return values
    finite = np.isfinite(values)
    window, inner = np.ones(2 * half_width + 1), slice(half_width, half_width + len(values))
    # no differences of cumulative sums, which lose all digits after one huge value
    total, num_finite = (np.convolve(part, window)[inner] for part in (np.where(finite, values, 0.0), finite))
    return np.where(num_finite > 0, total / np.maximum(num_finite, 1), np.nan)


# The panels of the page with their values, as JSON.


def build_panels(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The panels for which any run has values, in the order of the page; every number is finite or None."""
    panel_records = [(panel, [run.metrics.validation for run in runs]) for panel in HELD_OUT]
    panel_records += [(panel, [run.metrics.training for run in runs]) for panel in (*TRAINING, *_custom_panels(runs))]
    task_records: list[Sequence[Record]] = [[*map(_flatten_scores, run.metrics.tasks)] for run in runs]
    panel_records += [(panel, task_records) for panel in _task_panels(task_records)]
    panel_records += [(panel, [run.geometry for run in runs]) for panel in GEOMETRY]
    panels = []
    for panel, records_by_run in panel_records:
        series = [_series(k, records, panel) for k, records in enumerate(records_by_run)]
        if any(series):
            panels.append({**vars(panel), "series": [line for line in series if line]})
    return panels


def _series(run: int, records: Sequence[Record], panel: Panel) -> dict[str, Any] | None:
    """The series of run number `run`; None if it has no values. A vanilla run's 0 candidates count as missing."""
    y = column(records, panel.key)
    if panel.key == "candidates":
        y[y == 0] = np.nan
    if np.isnan(y).all():
        return None
    size = ceil(len(y) / MAX_POINTS)
    x = {name: _rounded(column(records, name)[size - 1 :: size]) for name in X_AXES}
    return {"run": run, "x": x, "y": _downsample(y, size), "mean": _downsample(panel.smoothed(y), size)}


def _downsample(values: Any, size: int) -> list[float | None]:
    """Means of `size` consecutive values, ignoring non-finite ones; an incomplete last group is dropped."""
    groups = values[: len(values) // size * size].reshape(-1, size)
    num_finite = np.isfinite(groups).sum(axis=1)
    return _rounded(np.where(num_finite > 0, np.nansum(groups, axis=1) / np.maximum(num_finite, 1), np.nan))


def _rounded(values: Any) -> list[float | None]:
    return [float(f"{value:.6g}") if isfinite(value) else None for value in values.tolist()]


def _custom_panels(runs: Sequence[Run]) -> Iterator[Panel]:
    """A panel for each metric that a user's objective logged beside its loss."""
    prefix, known = f"{CustomConfig.metric_prefix}_", {panel.key for panel in TRAINING}
    for key in dict.fromkeys(key for run in runs for record in run.metrics.training for key in record):
        if key.startswith(prefix) and key not in known:
            yield Panel(key, f"Auxiliary: {key.removeprefix(prefix)}", "of an objective of one's own")


def _task_panels(runs: Sequence[Sequence[Record]]) -> Iterator[Panel]:
    """A panel for each metric of each task that any run evaluated during training."""
    for key in dict.fromkeys(key for records in runs for record in records for key in record if key not in X_AXES):
        yield Panel(key, key.replace("/", "  ·  "), log_scale=key.endswith("perplexity"), dots=True)


def _flatten_scores(record: Record) -> Record:
    """The x axes of an evaluation of tasks, and its scores by "TASK/METRIC"."""
    tasks, axes = record["tasks"].items(), {name: record[name] for name in X_AXES}
    return axes | {f"{task}/{metric}": score["value"] for task, metrics in tasks for metric, score in metrics.items()}
