"""One or several runs as one self-contained HTML page: summary, charts, events, samples, settings.

template/page.html lays it out; its script, template/page.js, draws the charts from the JSON of `build_panels`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, isfinite
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from megahead.config.auxiliary import CustomConfig
from megahead.config.objective import auxiliary_curves
from megahead.report.read import Record, Run, events_of
from megahead.report.tables import format_value
from megahead.wording import format_duration, format_si, pluralize


def render_page(runs: Sequence[Run]) -> str:
    """The page's HTML; each run has a colour, by its position in `runs`."""
    panels, events = build_panels(runs), [events_of(run) for run in runs]
    pairs = zip(runs, events, strict=True)
    run_data = [{"name": run.name, "events": [vars(event) for event in run_events]} for run, run_events in pairs]
    settings = [dict(_flatten_config(run.config)) for run in runs]
    folder = Path(__file__).parent / "template"
    loader = FileSystemLoader(folder)
    templates = Environment(loader=loader, autoescape=True, trim_blocks=True, undefined=StrictUndefined)
    return templates.get_template("page.html").render(
        runs=runs,
        subtitle=_subtitle(runs[0]) if len(runs) == 1 else " · ".join(run.name for run in runs),
        summary=_summary(runs[0]),
        comparison=_comparison(runs),
        panels=panels,
        events=events,
        settings=settings,
        differing_settings=_differing_settings(settings),
        sections=[_by_section(run_settings) for run_settings in settings],
        data=json.dumps({"panels": panels, "runs": run_data}, allow_nan=False).replace("<", "\\u003c"),
        **{suffix: (folder / f"page.{suffix}").read_text(encoding="utf-8") for suffix in ("css", "js")},
    )


# The summary: each run's progress and last results.


def _summary(run: Run) -> dict[str, str]:
    """The run's progress and last results as text, by label; empty if unknown."""
    training, validation = run.metrics.training, run.metrics.validation
    last = max((*training, *validation), key=lambda record: record["step"])
    held_out = validation[-1] if validation else {}
    speeds = [record["tokens_per_second"] for record in training if record.get("tokens_per_second")]
    steps = run.number("training.steps")
    head = f" ({held_out['head']} head)" if held_out.get("head") else ""
    return {
        f"held-out perplexity{head}": _evaluation_number(held_out, "perplexity"),
        "bits per byte": _evaluation_number(held_out, "bits_per_byte"),
        "next token right": "" if held_out.get("accuracy") is None else f"{held_out['accuracy']:.1%}",
        "training loss": _format(training[-1].get("loss")) if training else "",
        f"steps{f' of {steps:,}' if steps else ''}": f"{last['step']:,}",
        "tokens read": format_si(last["tokens"]),
        "time trained": format_duration(last["seconds"]),
        "tokens/s (median)": format_si(median(speeds)) if speeds else "",
        "steps skipped": format_value(training[-1].get("skipped_steps")) if training else "",
        "ending": run.ending or "unknown",
    }


def _comparison(runs: Sequence[Run]) -> dict[str, list[dict[str, Any]]]:
    """Columns of the table of several runs: each run's value, and whether it is the lowest perplexity or bits."""
    rows = []
    for run in runs:
        held_out = run.metrics.validation[-1] if run.metrics.validation else {}
        values = {name.split(" of ")[0].split(" (")[0]: value for name, value in _summary(run).items()}
        rows.append(values | {"head": held_out.get("head") or ""})
    names = ["held-out perplexity", "bits per byte", "next token right", "head", "training loss", "steps"]
    names += ["tokens read", "time trained", "tokens/s", "steps skipped", "ending"]
    best = {"held-out perplexity": _argmin(runs, "perplexity"), "bits per byte": _argmin(runs, "bits_per_byte")}
    names = [name for name in names if any(row[name] for row in rows)]
    return {name: [{"value": row[name], "lowest": best.get(name) == k} for k, row in enumerate(rows)] for name in names}


def _argmin(runs: Sequence[Run], key: str) -> int | None:
    """The index of the run with the lowest last value of `key`; None if no run has one."""
    last = {k: run.metrics.validation[-1].get(key) for k, run in enumerate(runs) if run.metrics.validation}
    values = {k: value for k, value in last.items() if value is not None}
    return min(values, key=values.__getitem__) if values else None


def _evaluation_number(held_out: Record, key: str) -> str:
    """A number of an evaluation, after a ≤ if it is an upper bound."""
    value = _format(held_out.get(key))
    return f"\u2264 {value}" if value and held_out.get("upper_bound") else value


def _format(value: float | None) -> str:
    return "" if value is None else format_value(float(value))


# What was trained, and with which settings.


def _subtitle(run: Run) -> str:
    """What was trained, in one line, without settings that the configuration lacks."""
    numbers = ("model.num_layers", "model.hidden_size", "model.vocab_size", "batch.global_size", "data.sequence_length")
    layers, width, vocabulary, rows, length = (run.number(path) for path in numbers)
    shape = f"{run.text('model.family') or 'model'}, {pluralize(layers, 'layer')} x {width}" if layers else None
    parts = [
        _objective(run),
        run.text("model.size") or shape,
        f"vocabulary {vocabulary:,}" if vocabulary else None,
        f"{rows} x {length} tokens a step" if rows else None,
        run.text("engine.precision"),
    ]
    return " · ".join(part for part in parts if part)


def _objective(run: Run) -> str | None:
    """For example: headless, on next tokens for the first 50%, vanilla for the last 20% of the steps"""
    name = run.text("objective.name")
    causal, vanilla = (run.number(f"objective.schedule.{kind}_share") for kind in ("causal", "vanilla"))
    shares = [f"on next tokens for the first {causal:.0%}"] if causal else []
    shares += [f"vanilla for the last {vanilla:.0%}"] if vanilla else []
    return f"{', '.join([name, *shares])} of the steps" if name and shares else name


def _flatten_config(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(path, text of the value) of every setting that is not null."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten_config(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", str(value).lower() if isinstance(value, bool) else str(value)


def _differing_settings(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """The paths of settings in which the runs differ."""
    paths = dict.fromkeys(path for run in settings for path in run if path not in ("name", "output_dir"))
    return [path for path in paths if len({run.get(path, "") for run in settings}) > 1]


def _by_section(settings: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """A run's settings by section and field."""
    sections: dict[str, dict[str, str]] = {}
    for name, value in settings.items():
        section, _, field = name.rpartition(".")
        sections.setdefault(section or "run", {})[field] = value
    return sections


# The charts of runs, for the page and as PNG: a panel each, with a series for each run that has values.

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
    exact: bool = False
    """Whether values are free of noise, and not smoothed."""

    def smoothed(self, values: Any) -> Any:
        """The running mean over a fiftieth of the run if values are noisy; NaN where the value is NaN."""
        if self.dots or self.exact:
            return values
        return np.where(np.isnan(values), np.nan, running_mean(values, ceil(len(values) / 100)))


HELD_OUT = (
    Panel("perplexity", "Held-out perplexity", "comparable between runs of one tokenizer", log_scale=True, dots=True),
    Panel("bits_per_byte", "Held-out bits per byte", "comparable between tokenizers", dots=True),
    Panel("accuracy", "Next token right", "share of held-out targets", percent=True, dots=True),
)
TRAINING = (
    Panel("loss", "Training loss", "each run's own objective: headless and vanilla are not comparable"),
    Panel("gradient_norm", "Gradient norm", "before clipping", log_scale=True),
    Panel("learning_rate", "Learning rate", from_zero=True, exact=True),
    Panel("tokens_per_second", "Tokens per second", "while training, all ranks together", from_zero=True),
    Panel("candidates", "Candidates", "ids an output is compared with", from_zero=True),
    *(Panel(c.key, c.title, c.note, from_zero=c.from_zero, percent=c.percent) for c in auxiliary_curves()),
    Panel("mfu", "Model FLOPs utilisation", "share of the devices' peak", percent=True, from_zero=True),
)
GEOMETRY = (
    Panel("gradient_share", "Gradient that passes the head", "share of its squared norm", percent=True, dots=True),
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
    finite = np.isfinite(values)
    total = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    count = np.concatenate([[0], np.cumsum(finite)])
    index = np.arange(len(values))
    start, stop = np.maximum(index - half_width, 0), np.minimum(index + half_width + 1, len(values))
    num_finite = count[stop] - count[start]
    return np.where(num_finite > 0, (total[stop] - total[start]) / np.maximum(num_finite, 1), np.nan)


# The panels of the page with their values, as JSON.


def build_panels(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The panels for which any run has values, in the order of the page; every number is finite or None."""
    panel_records = [(panel, [run.metrics.validation for run in runs]) for panel in HELD_OUT]
    panel_records += [(panel, [run.metrics.training for run in runs]) for panel in (*TRAINING, *_custom_panels(runs))]
    panel_records += [(panel, [_score_records(run, panel.key) for run in runs]) for panel in _task_panels(runs)]
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


def _task_panels(runs: Sequence[Run]) -> Iterator[Panel]:
    """A panel for each metric of each task that any run evaluated during training."""
    for key in dict.fromkeys(key for run in runs for record in run.metrics.tasks for key in _flatten_scores(record)):
        yield Panel(key, key.replace("/", "  ·  "), log_scale=key.endswith("perplexity"), dots=True)


def _score_records(run: Run, key: str) -> list[Record]:
    """One record per evaluation of tasks: the x axes and the score `key`."""
    tasks = run.metrics.tasks
    return [{**{name: record[name] for name in X_AXES}, key: _flatten_scores(record).get(key)} for record in tasks]


def _flatten_scores(record: Record) -> dict[str, float]:
    """{"TASK/METRIC": value}"""
    tasks = record["tasks"].items()
    return {f"{task}/{metric}": score["value"] for task, metrics in tasks for metric, score in metrics.items()}
