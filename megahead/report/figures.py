"""Figures as PNG: curves of runs, synonyms, tasks along training. Shape suffix: P pairs of words."""

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
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from megahead.errors import UserError
from megahead.evaluate.geometry import Similarities
from megahead.files import atomic_path
from megahead.hf.settings import ExportOrigin, read_origin
from megahead.report.panels import HELD_OUT, TRAINING, Panel, column
from megahead.report.read import Record, RunMetrics, read_metrics
from megahead.run_folder import RunFolder

INK, MUTED, GRID = "#22272e", "#6b7280", "#e7e9ec"  # text, secondary text, grid
PALETTE = ("#2563b0", "#d9730d", "#1a8a6b", "#a3386f", "#7a5bc0", "#8a6d1d")  # distinct to colour-blind readers too
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": "#c6cad0",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
}


def save_figure(figure: Figure, output: Path, *, description: str = "") -> Path:
    """Writes a PNG (150 pixels an inch) atomically, with `description` in its metadata."""
    metadata = {"Description": description} if description else None
    with atomic_path(output) as path:
        figure.savefig(path, format="png", dpi=150, metadata=metadata)
    return output


# Curves of runs: loss and held-out perplexity against tokens and time; learning rate, gradient norm and speed.

OVER_TIME = " over time"
LARGE, SMALL = ("loss", "perplexity"), ("learning_rate", "gradient_norm", "tokens_per_second")
LAYOUT: Any = [[LARGE[k // 3], LARGE[k // 3] + OVER_TIME, SMALL[k // 2]] for k in range(6)]
TIME_UNITS = ((86400 * 2, 86400, "days"), (7200, 3600, "hours"), (120, 60, "minutes"), (0, 1, "seconds"))
"""(shortest run, in seconds, that is drawn in this unit; seconds of the unit; its name)."""


def draw_curves(runs: Sequence[RunMetrics]) -> Figure:
    """The figure of all `runs` (1980 x 1200 pixels), one colour per run."""
    panels = {panel.key: panel for panel in (*HELD_OUT, *TRAINING)}
    longest = max(record["seconds"] for run in runs for record in (*run.training, *run.validation))
    unit, unit_name = next((size, name) for least, size, name in TIME_UNITS if longest >= least)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(13.2, 8.0))
        figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1, wspace=0.02, hspace=0.02)
        for name, axes in figure.subplot_mosaic(LAYOUT, width_ratios=[1, 1, 0.8]).items():
            panel, over_time = panels[name.removesuffix(OVER_TIME)], name.endswith(OVER_TIME)
            for run, color in zip(runs, cycle(PALETTE), strict=False):
                records = run.validation if panel.dots else run.training
                x = column(records, "seconds") / unit if over_time else column(records, "tokens")
                label_end = len(runs) == 1 and panel.key in LARGE
                _draw_line(axes, panel, x, column(records, panel.key), color, label_end=label_end)
            _label_axes(axes, panel, unit_name if over_time else None)
        _add_run_legend(figure, runs)
        return figure


def _draw_line(axes: Axes, panel: Panel, x: Any, y: Any, color: str, *, label_end: bool) -> None:
    """Draws a line; of noisy values the running mean, over the values themselves in a light tone. Values of panels with
    `dots` (a few evaluations) are marked."""
    if not panel.dots and not panel.noise_free:
        axes.plot(x, y, color=color, alpha=0.22, linewidth=0.8)
    smooth, marker = panel.smoothed(y), "o" if panel.dots else ""
    axes.plot(x, smooth, color=color, marker=marker, markersize=3.5)
    if label_end and len(smooth) and np.isfinite(smooth[-1]):
        style: Any = {"xytext": (-2, 7), "textcoords": "offset points", "ha": "right", "fontweight": "bold"}
        axes.annotate(_format_value(smooth[-1]), (x[-1], smooth[-1]), color=color, **style)


def _label_axes(axes: Axes, panel: Panel, time_unit: str | None) -> None:
    """Titles and formats the axes; the horizontal one is time in `time_unit`, or tokens if None."""
    over_time, log = OVER_TIME if time_unit else "", " (log scale)" if panel.log_scale else ""
    axes.set_title(f"{panel.title}{over_time}{log}", pad=8)
    axes.set_xlabel(time_unit or "tokens")
    axes.tick_params(which="both", length=0)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    if time_unit is None:
        axes.xaxis.set_major_formatter(FuncFormatter(_format_count))
    if panel.log_scale:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif panel.from_zero:
        axes.yaxis.set_major_formatter(FuncFormatter(_format_count))
        axes.set_ylim(bottom=0)
    axes.margins(x=0.02)
    axes.set_xlim(left=0)


def _add_run_legend(figure: Figure, runs: Sequence[RunMetrics]) -> None:
    if len(runs) == 1:
        figure.suptitle(runs[0].name, x=0.012, ha="left", fontsize=13, fontweight="bold")
        return
    colors = (PALETTE[k % len(PALETTE)] for k in range(len(runs)))
    lines = [figure.axes[0].plot([], [], color=color, linewidth=3)[0] for color in colors]
    names = [f"{run.name}{_last_perplexity(run)}" for run in runs]
    figure.legend(lines, names, loc="outside upper left", ncols=min(4, len(runs)), fontsize=10, handlelength=1.2)


def _last_perplexity(run: RunMetrics) -> str:
    last = run.validation[-1] if run.validation else {}
    perplexity, bound = last.get("perplexity"), "at most " if last.get("upper_bound") else ""
    return "" if perplexity is None else f"  ·  perplexity {bound}{_format_value(perplexity)}"


def _format_value(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _format_count(value: float, _position: int) -> str:
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{suffix}"
    return f"{value:g}"


# Cosines of synonyms and of random pairs in each model's embedding: one panel per model, one scale.

BINS = np.linspace(-1, 1, 81)


def draw_similarities(models: Mapping[str, Similarities]) -> Figure:
    """Histograms of cosines as shares of the pairs, with their means; `models` by name."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 1.1 + 1.9 * len(models)))
        figure.set_layout_engine("constrained", h_pad=0.1)
        panels: Any = figure.subplots(len(models), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
        for k, (name, similarities) in enumerate(models.items()):
            _draw_histograms(panels[k], name, similarities, PALETTE[k % len(PALETTE)])
        panels[-1].set_xlabel("cosine of two words' input embeddings")
        cosines = [cosines_P.numpy() for model in models.values() for cosines_P in (model.synonyms_P, model.random_P)]
        low, high = np.quantile(np.concatenate(cosines), [0.001, 0.999])  # the range of nearly all cosines
        panels[0].set_xlim(max(-1.0, float(low) - 0.1), min(1.0, float(high) + 0.1))
        return figure


def _draw_histograms(axes: Axes, name: str, similarities: Similarities, color: str) -> None:
    pairs = ((similarities.random_P, MUTED, "random"), (similarities.synonyms_P, color, "synonyms"))
    for cosines_P, bar_color, label in pairs:
        share_P = np.full(len(cosines_P), 1 / len(cosines_P))
        mean = float(cosines_P.mean())
        axes.hist(cosines_P.numpy(), bins=BINS.tolist(), weights=share_P, color=bar_color, alpha=0.45)
        axes.axvline(mean, color=bar_color, label=f"{label}  ·  mean {mean:.3f}")
    axes.set_title(f"{name}  ·  synonyms {similarities.gap():+.3f}")
    axes.set_ylabel("share of pairs")
    axes.tick_params(length=0)
    axes.legend(loc="upper right", handlelength=1.2)


# Scores on tasks along training: a panel for each metric of a task, a line for each run.


class TaskPoint(NamedTuple):
    """The score of a run on one metric of a task, after `tokens` tokens and, if known, `hours` of training."""

    run: str
    tokens: int
    task: str
    metric: str
    value: float
    stderr: float | None
    hours: float | None = None


def logged_task_scores(run: RunMetrics) -> list[TaskPoint]:
    """The scores of a run on tasks during training; NaN for values that were logged as null."""
    return [
        TaskPoint(run.name, record["tokens"], task, metric, nan if s["value"] is None else s["value"], s["stderr"])
        for record in run.tasks
        for task, metrics in record["tasks"].items()
        for metric, s in metrics.items()
    ]


TrainingProgress = tuple[str, int, float | None]
"""Where a checkpoint stands on the curve of its run: the run, its tokens, and its hours, None without the run's log."""


def checkpoint_progress(folders: Mapping[Path, Path]) -> dict[Path, TrainingProgress]:
    """The progress of each model in `folders` ({model: Hugging Face folder}). A model that is such a folder itself has
    no known log; CheckpointError for one that megahead did not export."""
    origins = {model: read_origin(folder) for model, folder in folders.items()}
    names, read_log = run_names(origins, folders), cache(_read_log)
    progress: dict[Path, TrainingProgress] = {}
    for name, (model, origin) in zip(names, origins.items(), strict=True):
        log = read_log(RunFolder.of(model)) if folders[model] != model else ()
        hours = (record["seconds"] / 3600 for record in log if record["tokens"] <= origin.tokens)
        progress[model] = name, origin.tokens, max(hours, default=None)
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
    """The training steps and evaluations of a run's log; none without one."""
    with suppress(UserError):
        metrics = read_metrics(run.path)
        return [*metrics.training, *metrics.validation]
    return []


_MAX_COLUMNS = 4
_RANDOM_WEIGHTS: Any = {"color": MUTED, "linestyle": "--", "linewidth": 1}


def draw_task_curves(
    points: Sequence[TaskPoint], *, random_scores: Mapping[tuple[str, str], float] | None = None
) -> Figure:
    """Plots scores with their standard errors against tokens and, if all are known, hours; perplexities on a
    logarithmic scale. `random_scores`: from (task, metric) to the score of random weights, a dashed line."""
    colors = dict(zip(dict.fromkeys(point.run for point in points), cycle(PALETTE), strict=False))
    tasks = dict.fromkeys((point.task, point.metric) for point in points)
    x_axes = ["tokens"] if any(point.hours is None for point in points) else ["tokens", "hours"]
    panels = list(product(tasks, x_axes))
    num_columns, num_rows = min(len(panels), _MAX_COLUMNS), ceil(len(panels) / _MAX_COLUMNS)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(4.2 * num_columns, 0.6 + 2.8 * num_rows))
        figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.1)
        grid: Any = list(figure.subplots(num_rows, num_columns, squeeze=False).flat)
        handles: dict[str, Any] = {}
        for axes, (task, x_axis) in zip(grid, panels, strict=False):
            axes.set_title("  ·  ".join(task))
            axes.set_xlabel(x_axis)
            axes.tick_params(which="both", length=0)
            if task[1] == "perplexity":
                axes.set_yscale("log")
            handles |= _draw_lines(axes, [point for point in points if point[2:4] == task], x_axis, colors)
            if random_scores and task in random_scores:
                handles["random weights"] = axes.axhline(random_scores[task], **_RANDOM_WEIGHTS)
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        figure.legend([*handles.values()], [*handles], loc="outside upper left", ncols=4)
        return figure


def _draw_lines(axes: Axes, points: Sequence[TaskPoint], x_axis: str, colors: Mapping[str, str]) -> dict[str, Any]:
    """Returns each run's line, for the legend."""
    handles = {}
    for run, color in colors.items():
        line = {point.tokens: point for point in points if point.run == run}  # the last of several after equal tokens
        if line:
            rows = [(getattr(line[n], x_axis), line[n].value, line[n].stderr or 0.0) for n in sorted(line)]
            x, y, errors = zip(*rows, strict=True)
            style: dict[str, Any] = {"color": color, "marker": "o", "markersize": 3.5, "capsize": 2}
            handles[run] = axes.errorbar(x, y, errors, **style)
    return handles
