"""Scores on tasks along training: a panel for each metric of a task, a line for each run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import cycle, product
from math import ceil, nan
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megahead.errors import UserError
from megahead.hf.export import ExportOrigin, read_origin
from megahead.report.figures import MUTED, PALETTE, STYLE
from megahead.report.read import Record, RunMetrics, read_metrics
from megahead.run_folder import RunFolder


class TaskPoint(NamedTuple):
    """The score of a run on one metric of a task, after `tokens` tokens and, if known, `hours` of training."""

    run: str
    tokens: int
    task: str
    metric: str
    value: float
    stderr: float | None
    hours: float | None = None


def logged_points(run: RunMetrics) -> list[TaskPoint]:
    """The scores of a run on tasks during training; NaN for values that were logged as null."""
    return [
        TaskPoint(run.name, record["tokens"], task, metric, nan if s["value"] is None else s["value"], s["stderr"])
        for record in run.tasks
        for task, metrics in record["tasks"].items()
        for metric, s in metrics.items()
    ]


class TrainingProgress(NamedTuple):
    """Where a checkpoint stands on the curve of its run."""

    run: str
    tokens: int
    hours: float | None
    """None if the run's log is not known."""


def checkpoint_progress(folders: Mapping[Path, Path]) -> dict[Path, TrainingProgress]:
    """The progress of each model, from model to its Hugging Face folder; CheckpointError for one not by megahead."""
    origins = {model: read_origin(folder) for model, folder in folders.items()}
    names, read_log = run_names(origins, folders), cache(_read_log)
    progress = {}
    for name, (model, origin) in zip(names, origins.items(), strict=True):
        log = read_log(RunFolder.of(model)) if folders[model] != model else ()
        progress[model] = TrainingProgress(name, origin.tokens, _hours(log, origin.tokens))
    return progress


def run_names(origins: Mapping[Path, ExportOrigin], folders: Mapping[Path, Path]) -> list[str]:
    """The name of each model's run; runs of the same name are named by their folders, if known."""
    run_folders = {model: str(RunFolder.of(model)) for model, folder in folders.items() if folder != model}
    runs = {(origins[model].run, run_folder) for model, run_folder in run_folders.items()}
    count = Counter(name for name, _ in runs)
    return [
        run_folders.get(model, origin.run) if count[origin.run] > 1 else origin.run for model, origin in origins.items()
    ]


def _read_log(run: RunFolder) -> Sequence[Record]:
    """The records of a run's log with its time; none if it is not there."""
    with suppress(UserError):
        metrics = read_metrics(run.path)
        return [*metrics.training, *metrics.validation]
    return []


def _hours(records: Sequence[Record], tokens: int) -> float | None:
    """Hours of training after so many tokens."""
    return max((record["seconds"] / 3600 for record in records if record["tokens"] <= tokens), default=None)


_MAX_COLUMNS = 4
_RANDOM_WEIGHTS: Any = {"color": MUTED, "linestyle": "--", "linewidth": 1}


def draw_task_curves(points: Sequence[TaskPoint], *, floors: Mapping[tuple[str, str], float] | None = None) -> Figure:
    """Plots scores with their standard errors against tokens and, if all are known, hours; perplexities on a
    logarithmic scale. `floors`: from (task, metric) to the score of random weights, a dashed line."""
    colors = dict(zip(dict.fromkeys(point.run for point in points), cycle(PALETTE), strict=False))
    tasks = dict.fromkeys((point.task, point.metric) for point in points)
    clocks = ["tokens"] if any(point.hours is None for point in points) else ["tokens", "hours"]
    panels = list(product(tasks, clocks))
    num_columns, num_rows = min(len(panels), _MAX_COLUMNS), ceil(len(panels) / _MAX_COLUMNS)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(4.2 * num_columns, 0.6 + 2.8 * num_rows))
        figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.1)
        grid: Any = list(figure.subplots(num_rows, num_columns, squeeze=False).flat)
        handles: dict[str, Any] = {}
        for axes, (task, clock) in zip(grid, panels, strict=False):
            _label_panel(axes, task, clock)
            handles |= _draw_lines(axes, [point for point in points if point[2:4] == task], clock, colors)
            if floors and task in floors:
                handles["random weights"] = axes.axhline(floors[task], **_RANDOM_WEIGHTS)
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        figure.legend([*handles.values()], [*handles], loc="outside upper left", ncols=4)
        return figure


def _label_panel(axes: Axes, task: tuple[str, str], clock: str) -> None:
    axes.set_title("  ·  ".join(task))
    axes.set_xlabel(clock)
    axes.tick_params(which="both", length=0)
    if task[1] == "perplexity":
        axes.set_yscale("log")


def _draw_lines(axes: Axes, points: Sequence[TaskPoint], clock: str, colors: Mapping[str, str]) -> dict[str, Any]:
    """Returns each run's line, for the legend."""
    handles = {}
    for run, color in colors.items():
        line = {point.tokens: point for point in points if point.run == run}  # the last of several at one place
        if line:
            rows = [(getattr(line[n], clock), line[n].value, line[n].stderr or 0.0) for n in sorted(line)]
            x, y, errors = zip(*rows, strict=True)
            style: dict[str, Any] = {"color": color, "marker": "o", "markersize": 3.5, "capsize": 2}
            handles[run] = axes.errorbar(x, y, errors, **style)
    return handles
