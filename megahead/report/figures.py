"""Figures of runs: curves, scores on tasks, synonyms, and what *headless* means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from math import ceil, nan
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Polygon, Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from megahead.evaluate.geometry import Similarities
from megahead.evaluate.results import Score, TaskResult
from megahead.files import staged
from megahead.report.read import Record, RunMetrics

INK, QUIET, GRID = "#22272e", "#6b7280", "#e7e9ec"
PALETTE = ("#2563b0", "#d9730d", "#1a8a6b", "#a3386f", "#7a5bc0", "#8a6d1d")  # distinct to colour-blind readers too
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": QUIET,
    "axes.edgecolor": "#c6cad0",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
}


def save_figure(figure: Figure, output: Path, *, description: str = "") -> Path:
    """Writes a PNG (150 pixels an inch), whole or not at all; `description`: a text that it carries, such as what was
    drawn."""
    with staged(output) as partial:
        figure.savefig(partial, format="png", dpi=150, metadata={"Description": description} if description else None)
    return output


# Curves of one or several runs: loss and held-out perplexity against tokens and time, and their health.

LEFT, MIDDLE = ["loss"] * 3 + ["perplexity"] * 3, ["loss_time"] * 3 + ["perplexity_time"] * 3
RIGHT = ["rate"] * 2 + ["norm"] * 2 + ["speed"] * 2
LAYOUT: Any = [list(row) for row in zip(LEFT, MIDDLE, RIGHT, strict=True)]
TITLES = {
    "loss": "Training loss",
    "loss_time": "Training loss over time",
    "perplexity": "Held-out perplexity (log scale)",
    "perplexity_time": "Held-out perplexity over time (log scale)",
    "rate": "Learning rate",
    "norm": "Gradient norm (log scale)",
    "speed": "Tokens per second",
}
UNITS = ((86400 * 2, 86400, "days"), (7200, 3600, "hours"), (120, 60, "minutes"), (0, 1, "seconds"))  # from, size, name


def save_curves(runs: Sequence[RunMetrics], output: Path) -> Path:
    """Writes the figure as a PNG (1980 x 1200 pixels), whole or not at all."""
    return save_figure(draw_curves(runs), output)


def draw_curves(runs: Sequence[RunMetrics]) -> Figure:
    """The figure of all `runs`, a colour each. Loss is each run's own objective; perplexity is comparable."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(13.2, 8.0))
        figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1, wspace=0.02, hspace=0.02)
        panels = figure.subplot_mosaic(LAYOUT, width_ratios=[1, 1, 0.8])
        time_unit = _time_unit(runs)
        for run, color in zip(runs, cycle(PALETTE), strict=False):
            _draw_run(panels, run, color, time_unit, label_ends=len(runs) == 1)
        _name_panels(panels, time_unit[1])
        _name_runs(figure, runs)
        return figure


def _draw_run(
    panels: dict[str, Axes], run: RunMetrics, color: str, time_unit: tuple[float, str], *, label_ends: bool
) -> None:
    tokens, hours = _column(run.training, "tokens"), _column(run.training, "seconds") / time_unit[0]
    loss = _column(run.training, "loss")
    for panel, across in (("loss", tokens), ("loss_time", hours)):
        _noisy_line(panels[panel], across, loss, color, label_end=label_ends)
    _noisy_line(panels["norm"], tokens, _column(run.training, "gradient_norm"), color)
    _noisy_line(panels["speed"], tokens, _column(run.training, "tokens_per_second"), color)
    panels["rate"].plot(tokens, _column(run.training, "learning_rate"), color=color)

    tokens, hours = _column(run.validation, "tokens"), _column(run.validation, "seconds") / time_unit[0]
    perplexity = _column(run.validation, "perplexity")
    for panel, across in (("perplexity", tokens), ("perplexity_time", hours)):
        panels[panel].plot(across, perplexity, color=color, marker="o", markersize=3.5)
        if label_ends:
            _label_end(panels[panel], across, perplexity, color)


def _noisy_line(axes: Axes, x: Any, y: Any, color: str, *, label_end: bool = False) -> None:
    """The values themselves in a light tone and their running mean, over a fiftieth of the run, on top."""
    smooth = running_mean(y, len(y) // 100)
    axes.plot(x, y, color=color, alpha=0.22, linewidth=0.8)
    axes.plot(x, smooth, color=color)
    if label_end:
        _label_end(axes, x, smooth, color)


def running_mean(values: Any, reach: int) -> Any:
    """Mean of each value and the `reach` values on either side (fewer at the ends), non-finite ones left out."""
    finite = np.isfinite(values)
    total = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    count = np.concatenate([[0], np.cumsum(finite)])
    here = np.arange(len(values))
    first, last = np.maximum(here - reach, 0), np.minimum(here + reach + 1, len(values))
    counted = count[last] - count[first]
    return np.where(counted > 0, (total[last] - total[first]) / np.maximum(counted, 1), np.nan)


def _label_end(axes: Axes, x: Any, y: Any, color: str) -> None:
    if len(y) and np.isfinite(y[-1]):
        placed: Any = {"xytext": (-2, 7), "textcoords": "offset points", "ha": "right", "fontweight": "bold"}
        axes.annotate(_short(y[-1]), (x[-1], y[-1]), color=color, **placed)


def _name_panels(panels: dict[str, Axes], time_unit: str) -> None:
    for name, axes in panels.items():
        axes.set_title(TITLES[name], pad=8)
        axes.set_xlabel(time_unit if name.endswith("_time") else "tokens")
        axes.tick_params(which="both", length=0)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        if not name.endswith("_time"):
            axes.xaxis.set_major_formatter(FuncFormatter(_as_count))
        _name_values(axes, name)
        axes.margins(x=0.02)
        axes.set_xlim(left=0)


def _name_values(axes: Axes, name: str) -> None:
    if name.startswith(("perplexity", "norm")):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(_as_tick))
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif name == "rate":
        axes.yaxis.set_major_formatter(FuncFormatter(_as_tick))
        axes.set_ylim(bottom=0)
    elif name == "speed":
        axes.yaxis.set_major_formatter(FuncFormatter(_as_count))
        axes.set_ylim(bottom=0)


def _name_runs(figure: Figure, runs: Sequence[RunMetrics]) -> None:
    if len(runs) == 1:
        figure.suptitle(runs[0].name, x=0.012, ha="left", fontsize=13, fontweight="bold")
        return
    colors = (PALETTE[k % len(PALETTE)] for k in range(len(runs)))
    lines = [figure.axes[0].plot([], [], color=color, linewidth=3)[0] for color in colors]
    names = [f"{run.name}{_last_perplexity(run)}" for run in runs]
    figure.legend(lines, names, loc="outside upper left", ncols=min(4, len(runs)), fontsize=10, handlelength=1.2)


def _last_perplexity(run: RunMetrics) -> str:
    last = run.validation[-1] if run.validation else {}
    perplexity, most = last.get("perplexity"), "at most " if last.get("upper_bound") else ""
    return "" if perplexity is None else f"  ·  perplexity {most}{_short(perplexity)}"


def _time_unit(runs: Sequence[RunMetrics]) -> tuple[float, str]:
    """Seconds in the unit of the time axes, and its name."""
    longest = max(record["seconds"] for run in runs for record in (*run.training, *run.validation))
    return next((float(size), name) for start, size, name in UNITS if longest >= start)


def _column(records: Sequence[Record], name: str) -> Any:
    """One value a record; NaN where it is missing or not finite, so that the line breaks there."""
    values = np.array([np.nan if record.get(name) is None else record[name] for record in records], dtype=np.float64)
    return np.where(np.isfinite(values), values, np.nan)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _as_tick(value: float, _position: int) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def _as_count(value: float, _position: int) -> str:
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{suffix}"
    return f"{value:g}"


# Scores on tasks during training: a panel for each metric of a task, a line for each run.

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
    points = []
    for record in run.tasks:
        results = [_result(task, found) for task, found in record["tasks"].items()]
        points.append(TaskPoint(run.name, record["tokens"], results))
    return points


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
    results = [(point.tokens, result) for point in points for result in point.tasks if point.run == run]
    found: Mapping[int, Score] = {
        at: score for at, result in results if result.task == task for score in result.scores if score.metric == metric
    }
    tokens = sorted(found)
    return tokens, [found[at].value for at in tokens], [found[at].stderr or 0.0 for at in tokens]


def _result(task: str, found: Mapping[str, Mapping[str, Any]]) -> TaskResult:
    """As it was logged: without the number of examples, and with null for what is no finite number."""
    scores = [Score(metric, nan if s["value"] is None else s["value"], s["stderr"]) for metric, s in found.items()]
    return TaskResult(task, samples=0, scores=scores)


# How close synonyms are in each model's embedding, beside random pairs: one panel per model, one scale.

BINS = np.linspace(-1, 1, 81)


def save_similarities(models: Mapping[str, Similarities], output: Path) -> Path:
    """Writes the figure as a PNG, whole or not at all."""
    return save_figure(draw_similarities(models), output)


def draw_similarities(models: Mapping[str, Similarities]) -> Figure:
    """Histograms of cosines as shares of the pairs, with the means marked; models by name, one panel below another."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 1.1 + 1.9 * len(models)))
        figure.set_layout_engine("constrained", h_pad=0.1)
        panels: Any = figure.subplots(len(models), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
        for k, (name, found) in enumerate(models.items()):
            _draw(panels[k], name, found, PALETTE[k % len(PALETTE)])
        panels[-1].set_xlabel("cosine of two words' input embeddings")
        parts = [part.numpy() for found in models.values() for part in (found.synonyms_P, found.random_P)]
        low, high = np.quantile(np.concatenate(parts), [0.001, 0.999])  # the range of nearly all cosines, and a margin
        panels[0].set_xlim(max(-1.0, float(low) - 0.1), min(1.0, float(high) + 0.1))
        return figure


def _draw(axes: Axes, name: str, found: Similarities, color: str) -> None:
    for values, tone, label in ((found.random_P, QUIET, "random"), (found.synonyms_P, color, "synonyms")):
        share = np.full(len(values), 1 / len(values))
        mean = float(values.mean())
        axes.hist(values.numpy(), bins=BINS.tolist(), weights=share, color=tone, alpha=0.45)
        axes.axvline(mean, color=tone, label=f"{label}  ·  mean {mean:.3f}")
    axes.set_title(f"{name}  ·  synonyms {found.gap():+.3f}")
    axes.set_ylabel("share of pairs")
    axes.tick_params(length=0)
    axes.legend(loc="upper right", handlelength=1.2)


# What *headless* means: with what a vanilla and a headless model compare a hidden state.

SIZE = (9.0, 4.4)
"""Inches."""

BLUE, ORANGE = PALETTE[:2]
FAINT, GROUND = "#d5dbe3", "#ffffff"


def draw(output: Path) -> Path:
    """Writes the PNG, with a background colour, so that it is readable on dark pages too."""
    figure = Figure(figsize=SIZE, facecolor=GROUND)
    left, right = (figure.add_axes((x, 0, 0.5, 1)) for x in (0, 0.5))
    for axes in (left, right):
        axes.set(xlim=(0, 100), ylim=(0, 98))
        axes.axis("off")
    left.plot([100, 100], [7, 91], color=FAINT, linewidth=1, clip_on=False)
    _vanilla(left)
    _headless(right)
    return save_figure(figure, output)


def _vanilla(axes: Axes) -> None:
    _title(axes, "Vanilla", "Which token of the whole vocabulary comes next?", ORANGE)
    _model(axes)
    bottom, pitch, own = 18.5, 1.0, 13
    _fan(axes, bottom, bottom + 52, ORANGE)
    for k in range(52):
        y, alpha = bottom + pitch * k, 1.0 if k == own else 0.35
        axes.add_patch(Rectangle((60, y), 18, 0.7, color=ORANGE, alpha=alpha, linewidth=0))
    _label(axes, bottom + 54.5, "softmax head, V × D", ORANGE)
    _name(axes, bottom + pitch * (own + 0.4), "sat", own=True)
    _name(axes, bottom + 50, "aardvark")
    _name(axes, bottom + 2, "zygote")
    _caption(axes, "All tokens compete: N × V scores", "V: tens of thousands of tokens; N: targets of the batch")


def _headless(axes: Axes) -> None:
    _title(axes, "Headless", "Which of the tokens in this batch comes next?", BLUE)
    _model(axes)
    _fan(axes, 22, 63, BLUE)
    for k, word in enumerate(("cat", "sat", "on", "the", "mat")):
        y, own = 60.5 - 9 * k, word == "sat"
        axes.add_patch(Rectangle((60, y - 2.5), 18, 5, color=BLUE, alpha=1.0 if own else 0.35, linewidth=0))
        _name(axes, y, word, own=own)
    _label(axes, 65, "input embeddings, U × D", BLUE)
    _caption(axes, "Few compete, no head: N × U scores", "U: the different targets of the batch, a few thousand")


def _title(axes: Axes, name: str, question: str, colour: str) -> None:
    axes.text(6, 91, name, color=colour, fontsize=18, fontweight="bold", va="center")
    axes.text(6, 82.5, question, color=INK, fontsize=10.5, va="center")


def _label(axes: Axes, y: float, text: str, colour: str) -> None:
    axes.text(69, y, text, color=colour, fontsize=9.5, fontweight="bold", ha="center", va="bottom")


def _name(axes: Axes, y: float, word: str, own: bool = False) -> None:
    weight, size = ("bold", 12) if own else ("normal", 9.5)
    axes.text(81, y, word, color=INK if own else QUIET, fontsize=size, fontweight=weight, va="center")


def _model(axes: Axes) -> None:
    """The text so far, the backbone and its hidden state."""
    axes.text(17, 19.5, "The cat …", color=INK, fontsize=12, ha="center", va="center")
    body = FancyBboxPatch((6, 36), 22, 20, boxstyle="round,pad=0,rounding_size=2.5")
    body.set(facecolor="#eef1f5", edgecolor="#c6cad0")
    axes.add_patch(body)
    axes.text(17, 46, "backbone", color=INK, fontsize=11, ha="center", va="center")
    _arrow(axes, (17, 24), (17, 35), QUIET)
    _arrow(axes, (28.5, 46), (35.5, 46), QUIET)
    axes.add_patch(Rectangle((36.5, 38), 3.4, 16, color=INK, linewidth=0))
    axes.text(38.2, 35.5, "hidden\nstate", color=QUIET, fontsize=9, ha="center", va="top", linespacing=1.1)


def _fan(axes: Axes, bottom: float, top: float, colour: str) -> None:
    """A triangle from the hidden state to everything that it is compared with."""
    corners = [(40.6, 46), (59, bottom), (59, top)]
    axes.add_patch(Polygon(corners, color=colour, alpha=0.1, linewidth=0))


def _arrow(axes: Axes, begin: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    arrow = FancyArrowPatch(begin, end, arrowstyle="-|>", mutation_scale=11, shrinkA=0, shrinkB=0)
    arrow.set(color=colour, linewidth=1.4)
    axes.add_patch(arrow)


def _caption(axes: Axes, cost: str, meaning: str) -> None:
    axes.text(6, 10.5, cost, color=INK, fontsize=11, fontweight="bold", va="center")
    axes.text(6, 5, meaning, color=QUIET, fontsize=9, va="center")
