"""Figures of experiments: panels of lines, one colour a name in all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, NullLocator

from megahead.report.figures import PALETTE, STYLE, save_figure
from megahead.report.tables import show

Line = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Chart:
    """One panel: lines by name, each of (across, up)."""

    title: str
    across: str
    lines: Mapping[str, Line]
    log_across: bool = False  # powers on an even scale; only the points' own positions are marked
    log_up: bool = False
    from_zero: bool = False


def save_charts(charts: Sequence[Chart], output: Path) -> Path:
    """Writes the panels side by side as a PNG, whole or not at all."""
    return save_figure(draw_charts(charts), output)


def draw_charts(charts: Sequence[Chart]) -> Figure:
    """The panels with one legend."""
    names = list(dict.fromkeys(name for chart in charts for name in chart.lines))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(4.4 * len(charts), 3.6))
        figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.1)
        panels: Any = figure.subplots(1, len(charts), squeeze=False)[0]
        for axes, chart in zip(panels, charts, strict=True):
            _draw(axes, chart, names)
        handles = {line.get_label(): line for axes in panels for line in axes.get_lines()}
        figure.legend([handles[name] for name in names], names, loc="outside upper left", ncols=min(4, 2 + len(charts)))
        return figure


def _draw(axes: Axes, chart: Chart, names: Sequence[str]) -> None:
    for name, line in chart.lines.items():
        color = PALETTE[names.index(name) % len(PALETTE)]
        axes.plot(*zip(*sorted(line), strict=True), color=color, marker="o", markersize=3.5, label=name)
    axes.set_title(chart.title)
    axes.set_xlabel(chart.across)
    axes.tick_params(which="both", length=0)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if chart.log_across:
        _mark_points(axes, sorted({x for line in chart.lines.values() for x, _ in line}))
    if chart.log_up:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: show(value)))
        axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: show(value)))
    if chart.from_zero:
        axes.set_ylim(bottom=0)


def _mark_points(axes: Axes, positions: Sequence[float]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(positions, [show(round(position)) for position in positions])
    axes.xaxis.set_minor_locator(NullLocator())
