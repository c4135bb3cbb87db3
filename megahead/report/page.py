"""One or several runs as one self-contained HTML page: summary, charts, events, samples, settings.

template/page.html lays it out; its script, template/page.js, draws the charts from the JSON of `build_panels`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from megahead.report.panels import build_panels
from megahead.report.read import Record, Run, events_of
from megahead.report.tables import format_value
from megahead.wording import format_duration, format_si, pluralize


def render_page(runs: Sequence[Run]) -> str:
    """The page's HTML; each run has a colour, by its position in `runs`."""
    panels, events = build_panels(runs), [events_of(run) for run in runs]
    pairs = zip(runs, events, strict=True)
    run_data = [{"name": run.name, "events": [vars(event) for event in run_events]} for run, run_events in pairs]
    settings = [dict(_flatten_config(run.config)) for run in runs]
    paths = dict.fromkeys(path for run_settings in settings for path in run_settings)
    differing = [path for path in paths if len({run_settings.get(path, "") for run_settings in settings}) > 1]
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
        differing_settings=[path for path in differing if path not in ("name", "output_dir")],
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
        "accuracy": "" if held_out.get("accuracy") is None else f"{held_out['accuracy']:.1%}",
        "training loss": _format(training[-1].get("loss")) if training else "",
        f"steps{f' of {steps:,}' if steps else ''}": f"{last['step']:,}",
        "tokens read": format_si(last["tokens"]),
        "time trained": format_duration(last["seconds"]),
        "tokens/s (median)": format_si(median(speeds)) if speeds else "",
        "steps skipped": format_value(training[-1].get("skipped_steps")) if training else "",
        "ending": run.ending or "unknown",
    }


def _comparison(runs: Sequence[Run]) -> dict[str, list[dict[str, Any]]]:
    """The columns that compare runs: each run's value, and whether it is the lowest (perplexity, bits per byte)."""
    rows = []
    for run in runs:
        held_out = run.metrics.validation[-1] if run.metrics.validation else {}
        values = {name.split(" of ")[0].split(" (")[0]: value for name, value in _summary(run).items()}
        rows.append(values | {"head": held_out.get("head") or ""})
    names = ["held-out perplexity", "bits per byte", "accuracy", "head", "training loss", "steps"]
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


def _by_section(settings: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """A run's settings by section and field."""
    sections: dict[str, dict[str, str]] = {}
    for name, value in settings.items():
        section, _, field = name.rpartition(".")
        sections.setdefault(section or "run", {})[field] = value
    return sections
