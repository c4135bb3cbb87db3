"""Draws scores on tasks during training: a panel for each metric of a task, a line for each run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, nan
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from megahead.evaluate.results import Score, TaskResult
from megahead.report.metrics import RunMetrics
from megahead.report.style import PALETTE, STYLE, save_figure

_COLUMNS = 3
"""Panels beside each other, at most."""


@dataclass(frozen=True)
class TaskPoint:
    """A run's results on tasks after a number of tokens."""

    run: str
    tokens: int
    tasks: Sequence[TaskResult]


def logged_points(run: RunMetrics) -> list[TaskPoint]:
    """The tasks that a run evaluated while it trained."""
    return [
        TaskPoint(run.name, record["tokens"], [_result(task, found) for task, found in record["tasks"].items()])
        for record in run.tasks
    ]


def save_task_curves(points: Sequence[TaskPoint], output: Path) -> Path:
    """Writes the figure as a PNG, whole or not at all."""
    return save_figure(draw_task_curves(points), output)


def draw_task_curves(points: Sequence[TaskPoint]) -> Figure:
    """Values with their standard errors against tokens; perplexities on a logarithmic scale."""
    metrics = list(dict.fromkeys((t.task, s.metric) for point in points for t in point.tasks for s in t.scores))
    runs = list(dict.fromkeys(point.run for point in points))
    rows = ceil(len(metrics) / _COLUMNS)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(4.2 * min(len(metrics), _COLUMNS), 0.6 + 2.8 * rows))
        figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.1)
        panels: Any = list(figure.subplots(rows, min(len(metrics), _COLUMNS), squeeze=False).flat)
        handles: dict[str, Any] = {}
        for axes, (task, metric) in zip(panels, metrics, strict=False):
            axes.set_title(f"{task}  ·  {metric}")
            axes.set_xlabel("tokens")
            axes.tick_params(which="both", length=0)
            if metric == "perplexity":
                axes.set_yscale("log")
            for k, run in enumerate(runs):
                tokens, values, errors = _line(points, run, task, metric)
                style: dict[str, Any] = {"color": PALETTE[k % len(PALETTE)], "marker": "o", "markersize": 3.5}
                handles[run] = axes.errorbar(tokens, values, errors, capsize=2, **style)
        for axes in panels[len(metrics) :]:
            axes.set_axis_off()
        figure.legend([*handles.values()], [*handles], loc="outside upper left", ncols=4)
        return figure


def _line(points: Sequence[TaskPoint], run: str, task: str, metric: str) -> tuple[list[int], list[float], list[float]]:
    """Tokens, values and standard errors (0 where unknown) of a run on a metric, by tokens."""
    found: Mapping[int, Score] = {
        point.tokens: score
        for point in points
        if point.run == run
        for result in point.tasks
        if result.task == task
        for score in result.scores
        if score.metric == metric
    }
    ordered = [(tokens, found[tokens]) for tokens in sorted(found)]
    return [t for t, _ in ordered], [s.value for _, s in ordered], [s.stderr or 0.0 for _, s in ordered]


def _result(task: str, found: Mapping[str, Mapping[str, Any]]) -> TaskResult:
    """As it was logged: without the number of examples, and with null for what is no finite number."""
    values = {metric: nan if score["value"] is None else score["value"] for metric, score in found.items()}
    scores = [Score(metric, values[metric], score["stderr"]) for metric, score in found.items()]
    return TaskResult(task, samples=0, scores=scores)
