"""What an experiment reads off its runs, how their rows are put together, and how they are drawn."""

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


def speed(run: RunMetrics) -> int:
    """Tokens a second of the median log line; where steps of a run's phases take differing times, over all of them."""
    switches = [event["step"] for event in run.events if event.get("session", {}).get("new_phase")]
    seconds, done, last = 0.0, 0, run.training[-1]
    for switch in sorted({*switches, last["step"]}):
        logged = [record for record in run.training if record["step"] <= switch and record["tokens"] > done]
        seconds += (logged[-1]["tokens"] - done) / float(median(record["tokens_per_second"] for record in logged))
        done = logged[-1]["tokens"]
    return round(done / seconds)


def spent(run: RunMetrics, until: int | None = None) -> float:
    """CPU seconds of rank 0 in the steps that the log has, or those `until` one, in which what else keeps the machine
    busy does not count; on a GPU seconds."""
    column, seconds = "step_seconds" if torch.cuda.is_available() else "step_cpu_seconds", 0.0
    sessions = [event["step"] for event in run.events if "session" in event]
    done = int(sessions[0]) if sessions else 0  # the step of the checkpoint of another run that it went on from
    for record in run.training:
        last = record["step"] if until is None else min(record["step"], until)
        seconds += float(record[column]) * max(0, last - done)
        done = record["step"]
    return seconds


def cost(run: RunMetrics) -> float:
    """What a token costs, for ratios: the time `spent` on it."""
    return spent(run) / float(run.training[-1]["tokens"])


def candidates(run: RunMetrics, steps: range | None = None) -> int | None:
    """Different ids that competed, on average over the run or some of its steps; None for a vanilla one."""
    logged = [record for record in run.training if steps is None or record["step"] - 1 in steps]
    counts = [record["candidates"] for record in logged if record.get("candidates")]
    return round(sum(counts) / len(counts)) if counts else None


MEASURES: dict[str, Callable[[RunMetrics], Any]] = {"speed": speed, "candidates": candidates}


def measured(run: RunMetrics, columns: Mapping[str, str]) -> Row:
    """By title: one of MEASURES, or else a score of the last evaluation."""
    last = run.validation[-1]
    return {title: MEASURES[name](run) if name in MEASURES else last[name] for title, name in columns.items()}


def scores(record: Mapping[str, Any]) -> Row:
    """Those of an evaluation; an encoder has no bits per byte."""
    row = {name: record[name] for name in ("perplexity", "accuracy")}
    return row | ({} if record["bits_per_byte"] is None else {"bits per byte": record["bits_per_byte"]})


def over_seeds(rows: Sequence[Row], by: Sequence[str], values: Sequence[str]) -> list[Row]:
    """One row for all that agree in `by`: how many they are, mean and standard deviation of each of `values`."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in by), []).append(row)
    told: list[Row] = []
    for key, group in groups.items():
        told.append({**dict(zip(by, key, strict=True)), "seeds": len(group)})
        for name in values:
            found = [row[name] for row in group]
            told[-1] |= {name: mean(found), f"± {name}": stdev(found) if len(found) > 1 else None}
    return told


def percent(shares: Sequence[float]) -> str:
    """Mean ± standard deviation of several runs, as a cell."""
    spread = f" ± {100 * stdev(shares):.1f}" if len(shares) > 1 else ""
    return f"{100 * mean(shares):.1f}{spread}"


def lines(rows: Sequence[Row], name: str, across: str, up: str) -> dict[str, list[tuple[float, float]]]:
    """A chart's lines: the points (`across`, `up`) of rows with the same `name`: a column, or text with {columns}."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        line = name.format(**row) if "{" in name else str(row[name])
        found.setdefault(line, []).append((row[across], row[up]))
    return found


@dataclass(frozen=True)
class Chart:
    """One panel: lines by name, each of (across, up)."""

    title: str
    across: str
    lines: Lines
    log_across: bool = False  # powers on an even scale; only the points' own positions are marked
    log_up: bool = False
    from_zero: bool = False


def draw_charts(charts: Sequence[Chart]) -> Figure:
    """The panels side by side with one legend, one colour a name in all of them."""
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
        positions = sorted({x for line in chart.lines.values() for x, _ in line})
        axes.set_xscale("log", base=2)
        axes.set_xticks(positions, [format_value(round(position)) for position in positions])
        axes.xaxis.set_minor_locator(NullLocator())
    if chart.log_up:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_value(value)))
        axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: format_value(value)))
    if chart.from_zero:
        axes.set_ylim(bottom=0)
