"""Draws one figure of one or several runs: loss and held-out perplexity against tokens and time, and their health."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from megahead.report.metrics import Record, RunMetrics
from megahead.report.style import PALETTE, STYLE, save_figure

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
        for run, color in zip(runs, _colors(len(runs)), strict=True):
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
    lines = [figure.axes[0].plot([], [], color=color, linewidth=3)[0] for color in _colors(len(runs))]
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


def _colors(count: int) -> list[str]:
    return [PALETTE[k % len(PALETTE)] for k in range(count)]


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _as_tick(value: float, _position: int) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def _as_count(value: float, _position: int) -> str:
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{suffix}"
    return f"{value:g}"
