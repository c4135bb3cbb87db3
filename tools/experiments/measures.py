"""Measurements of runs, aggregation of table rows, and charts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median, stdev
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, NullLocator

from megahead.report.figures import PALETTE, STYLE
from megahead.report.read import RunMetrics
from megahead.report.tables import format_value

Row = dict[str, Any]
Lines = Mapping[str, Sequence[tuple[float, float]]]


def tokens_per_second(run: RunMetrics) -> int:
    """Tokens a second: the median of the log lines; over several phases, from the median of each."""
    switches = [event["step"] for event in run.events if event.get("session", {}).get("new_phase")]
    seconds, done, last = 0.0, 0, run.training[-1]
    for switch in sorted({*switches, last["step"]}):
        logged = [record for record in run.training if record["step"] <= switch and record["tokens"] > done]
        seconds += (logged[-1]["tokens"] - done) / float(median(record["tokens_per_second"] for record in logged))
        done = logged[-1]["tokens"]
    return round(done / seconds)


def time_spent(run: RunMetrics, last_step: int | None = None) -> float:
    """CPU seconds (without other programs) of rank 0 in the logged steps up to `last_step`; on a GPU wall seconds."""
    column, seconds = "step_seconds" if torch.cuda.is_available() else "step_cpu_seconds", 0.0
    sessions = [event["step"] for event in run.events if "session" in event]
    previous_step = int(sessions[0]) if sessions else 0  # the step of the checkpoint that the run was forked from
    for record in run.training:
        record_end = record["step"] if last_step is None else min(record["step"], last_step)
        seconds += float(record[column]) * max(0, record_end - previous_step)
        previous_step = record["step"]
    return seconds


def mean_candidates(run: RunMetrics, steps: range | None = None) -> int | None:
    """Mean number of candidates, over the run or `steps`; None for a vanilla run."""
    logged = [record for record in run.training if steps is None or record["step"] - 1 in steps]
    counts = [record["candidates"] for record in logged if record.get("candidates")]
    return round(sum(counts) / len(counts)) if counts else None


MEASURES: dict[str, Callable[[RunMetrics], Any]] = {"speed": tokens_per_second, "candidates": mean_candidates}
"""Columns of a grid's table other than scores of the last evaluation."""


def evaluation_scores(record: Mapping[str, Any]) -> Row:
    """The scores of an evaluation; an encoder has no bits per byte."""
    row = {name: record[name] for name in ("perplexity", "accuracy")}
    return row | ({} if record["bits_per_byte"] is None else {"bits per byte": record["bits_per_byte"]})


def aggregate_seeds(rows: Sequence[Row], by: Sequence[str], values: Sequence[str]) -> list[Row]:
    """Groups rows by the columns `by`; a group's row has its size, and mean and standard deviation of `values`."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in by), []).append(row)
    aggregated: list[Row] = []
    for key, group in groups.items():
        aggregated.append({**dict(zip(by, key, strict=True)), "seeds": len(group)})
        for name in values:
            numbers = [row[name] for row in group]
            aggregated[-1] |= {name: mean(numbers), f"± {name}": stdev(numbers) if len(numbers) > 1 else None}
    return aggregated


def percent(shares: Sequence[float]) -> str:
    """Formats mean ± standard deviation in percent."""
    spread = f" ± {100 * stdev(shares):.1f}" if len(shares) > 1 else ""
    return f"{100 * mean(shares):.1f}{spread}"


def group_points(rows: Sequence[Row], name: str, x: str, y: str) -> dict[str, list[tuple[float, float]]]:
    """The lines of a chart: points (`x`, `y`) of rows by `name`, a column or a format string of columns."""
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        line = name.format(**row) if "{" in name else str(row[name])
        points.setdefault(line, []).append((row[x], row[y]))
    return points


@dataclass(frozen=True)
class Chart:
    """One panel: lines by name, each of (x, y) points."""

    title: str
    x: str
    lines: Lines
    log_x: bool = False  # log scale with ticks at the points
    log_y: bool = False
    from_zero: bool = False

    @staticmethod
    def of(rows: Sequence[Row], title: str, line: str, x: str, y: str, **options: bool) -> Chart:
        """The panel of the columns `x` and `y`, with lines as by `group_points`."""
        return Chart(title, x, group_points(rows, line, x, y), **options)


def draw_charts(charts: Sequence[Chart]) -> Figure:
    """Draws the panels side by side, with one legend and one colour for each line name."""
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
    axes.set_xlabel(chart.x)
    axes.tick_params(which="both", length=0)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if chart.log_x:
        positions = sorted({x for line in chart.lines.values() for x, _ in line})
        axes.set_xscale("log", base=2)
        axes.set_xticks(positions, [format_value(round(position)) for position in positions])
        axes.xaxis.set_minor_locator(NullLocator())
    if chart.log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_value(value)))
        axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: format_value(value)))
    if chart.from_zero:
        axes.set_ylim(bottom=0)
