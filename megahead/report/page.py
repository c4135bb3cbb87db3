"""One or several runs as one HTML page that needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, isfinite
from pathlib import Path
from statistics import median
from string import Template
from typing import Any

import numpy as np

from megahead.files import write_atomically
from megahead.report.figures import running_mean
from megahead.report.read import Event, Record, Run, events_of
from megahead.report.tables import show
from megahead.wording import counted, duration, thousands

# The data of the page's charts: panels, each with one series per run, as plain JSON.


MAX_POINTS = 600
"""Most points of a line; in longer logs each point is the mean of consecutive values."""

X_AXES = ("tokens", "step", "seconds")


@dataclass(frozen=True)
class Panel:
    """One chart: what it is called, and how its values are shown."""

    key: str
    title: str
    note: str = ""
    log: bool = False
    zero: bool = False
    """The axis begins at 0."""
    percent: bool = False
    dots: bool = False
    """Whether to draw single points, for few values (evaluations), instead of many noisy ones."""
    exact: bool = False
    """Whether values have no noise that should be smoothed."""


HELD_OUT = (
    Panel("perplexity", "Held-out perplexity", "comparable between runs of one tokenizer", log=True, dots=True),
    Panel("bits_per_byte", "Held-out bits per byte", "comparable between tokenizers", dots=True),
    Panel("accuracy", "Next token right", "share of held-out targets", percent=True, dots=True),
)
TRAINING = (
    Panel("loss", "Training loss", "each run's own objective: headless and vanilla are not comparable"),
    Panel("gradient_norm", "Gradient norm", "before clipping", log=True),
    Panel("learning_rate", "Learning rate", zero=True, exact=True),
    Panel("tokens_per_second", "Tokens per second", "while training, all ranks together", zero=True),
    Panel("candidates", "Candidates", "ids an output is compared with", zero=True),
    Panel("generator_loss", "Generator's loss", "of masked tokens, where some are replaced"),
    Panel("detection_loss", "Detection loss", "of whether a token was replaced", zero=True),
    Panel("detection_found", "Replaced tokens found", "share of them", percent=True, zero=True),
    Panel("phrase_loss", "Phrase loss", "at the ends of masked phrases"),
    Panel("phrase_found", "Masked phrases found", "share of their ends", percent=True, zero=True),
    Panel("mfu", "Model FLOPs utilisation", "share of the devices' peak", percent=True, zero=True),
)
GEOMETRY = (
    Panel("gradient_share", "Gradient that the head lets through", "of the loss's, by scores", percent=True, dots=True),
    Panel("output_rank", "Effective rank of outputs", "at most the width", zero=True, dots=True),
    Panel("embedding_rank", "Effective rank of the embedding", "at most the width", zero=True, dots=True),
    Panel("output_anisotropy", "Anisotropy of outputs", "mean cosine of two", dots=True),
    Panel("embedding_anisotropy", "Anisotropy of the embedding", "mean cosine of two rows", dots=True),
)


def build_panels(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The panels for which any run has values, in the order of the page; every number is finite or null."""
    drawn = [(panel, [run.metrics.validation for run in runs]) for panel in HELD_OUT]
    drawn += [(panel, [run.metrics.training for run in runs]) for panel in TRAINING]
    drawn += [(panel, [_along(run.metrics.tasks, panel.key) for run in runs]) for panel in _task_panels(runs)]
    drawn += [(panel, [run.geometry for run in runs]) for panel in GEOMETRY]
    built = []
    for panel, records in drawn:
        lines = [_series(k, lines, panel) for k, lines in enumerate(records)]
        lines = [line for line in lines if line is not None]
        if lines:
            built.append({**vars(panel), "series": lines})
    return built


def _series(run: int, records: Sequence[Record], panel: Panel) -> dict[str, Any] | None:
    """The series of a run; None if it has no value. A vanilla run logs 0 candidates, which counts as no value."""
    values = [record.get(panel.key) for record in records]
    if panel.key == "candidates":
        values = [value or None for value in values]
    if not any(value is not None and isfinite(value) for value in values):
        return None
    y = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    y[~np.isfinite(y)] = np.nan
    x = {name: np.array([record[name] for record in records], dtype=np.float64) for name in X_AXES}
    mean = y if panel.dots or panel.exact else np.where(np.isnan(y), np.nan, running_mean(y, ceil(len(y) / 100)))
    size = ceil(len(y) / MAX_POINTS)
    return {
        "run": run,
        "x": {name: _numbers(values[size - 1 :: size]) for name, values in x.items()},
        "y": _thin(y, size),
        "mean": _thin(mean, size),
    }


def _thin(values: Any, size: int) -> list[float | None]:
    """Means of `size` consecutive values, those that are not finite left out; an incomplete last group is dropped."""
    groups = values[: len(values) // size * size].reshape(-1, size)
    counted = np.isfinite(groups).sum(axis=1)
    return _numbers(np.where(counted > 0, np.nansum(groups, axis=1) / np.maximum(counted, 1), np.nan))


def _numbers(values: Any) -> list[float | None]:
    return [float(f"{value:.6g}") if isfinite(value) else None for value in values.tolist()]


def _task_panels(runs: Sequence[Run]) -> Iterator[Panel]:
    """A panel for each metric of each task that any run evaluated while it trained."""
    for key in dict.fromkeys(key for run in runs for record in run.metrics.tasks for key in _flat(record)):
        yield Panel(key, key.replace("/", "  ·  "), log=key.endswith("perplexity"), dots=True)


def _along(tasks: Sequence[Record], key: str) -> list[Record]:
    return [{**{name: record[name] for name in X_AXES}, key: _flat(record).get(key)} for record in tasks]


def _flat(record: Record) -> dict[str, float]:
    found = record["tasks"].items()
    return {f"{task}/{metric}": score["value"] for task, metrics in found for metric, score in metrics.items()}


# The legend of a page: a colour for each run, buttons to hide runs, and the choice of the horizontal axis.


_AXES = {"tokens": "tokens", "step": "steps", "seconds": "time"}


def legend(runs: Sequence[Run]) -> str:
    keys = [f"<button class=key aria-pressed=true>{dot(k)}{escape(run.name)}</button>" for k, run in enumerate(runs)]
    axes = [
        f"<button value={axis} aria-pressed={'true' if axis == 'tokens' else 'false'}>{name}</button>"
        for axis, name in _AXES.items()
    ]
    shown = "".join(keys) if len(runs) > 1 else ""
    across = f"<div class=across role=group aria-label='horizontal axis'>{''.join(axes)}</div>"
    return f"<div class=bar><div class=keys>{shown}</div>{across}</div>"


def dot(run: int) -> str:
    """A run's colour; from the ninth on a ring, whose line is dashed."""
    kind = "dot ring" if run >= 8 else "dot"
    return f"<span class='{kind}' style='--its:var(--run-{run % 8})'></span>"


# How far runs are: tiles for one run, a table for several.


def _figures(run: Run) -> dict[str, str]:
    """How far the run is, by names; empty if unknown."""
    training, validation = run.metrics.training, run.metrics.validation
    last = max((*training, *validation), key=lambda record: record["step"])
    held_out = validation[-1] if validation else {}
    speeds = [record["tokens_per_second"] for record in training if record.get("tokens_per_second")]
    steps = run.number("training.steps")
    head = f" ({held_out['head']} head)" if held_out.get("head") else ""
    return {
        f"held-out perplexity{head}": _held_out(held_out, "perplexity"),
        "bits per byte": _held_out(held_out, "bits_per_byte"),
        "next token right": "" if held_out.get("accuracy") is None else f"{held_out['accuracy']:.1%}",
        "training loss": _number(training[-1].get("loss")) if training else "",
        f"steps{f' of {steps:,}' if steps else ''}": f"{last['step']:,}",
        "tokens read": thousands(last["tokens"]),
        "time trained": duration(last["seconds"]),
        "tokens/s (median)": thousands(median(speeds)) if speeds else "",
        "steps skipped": show(training[-1].get("skipped_steps")) if training else "",
        "ending": run.ending or "not noted",
    }


def tiles(run: Run) -> str:
    figures = {name: value for name, value in _figures(run).items() if value}
    shown = [
        f"<div class='card tile'><b>{escape(value)}</b><span>{escape(name)}</span></div>"
        for name, value in figures.items()
    ]
    return f"<div class=tiles>{''.join(shown)}</div>"


def standing(runs: Sequence[Run]) -> str:
    """One row a run; the lowest perplexity and bits per byte stand out."""
    rows = []
    for run in runs:
        held_out = run.metrics.validation[-1] if run.metrics.validation else {}
        figures = {name.split(" of ")[0].split(" (")[0]: value for name, value in _figures(run).items()}
        rows.append({**figures, "head": held_out.get("head") or ""})
    names = ["held-out perplexity", "bits per byte", "next token right", "head", "training loss", "steps"]
    names += ["tokens read", "time trained", "tokens/s", "steps skipped", "ending"]
    names = [name for name in names if any(row[name] for row in rows)]
    best = {key: _lowest(runs, key) for key in ("perplexity", "bits_per_byte")}
    lines = [f"<tr><th>run</th>{''.join(f'<th class=number>{escape(name)}</th>' for name in names)}</tr>"]
    for k, row in enumerate(rows):
        marks = {"held-out perplexity": best["perplexity"] == k, "bits per byte": best["bits_per_byte"] == k}
        cells = [f"<td class='number{' best' if marks.get(name) else ''}'>{escape(row[name])}</td>" for name in names]
        lines.append(f"<tr><td>{dot(k)} {escape(runs[k].name)}</td>{''.join(cells)}</tr>")
    return f"<div class='card wide'><table>{''.join(lines)}</table></div>"


def _lowest(runs: Sequence[Run], key: str) -> int | None:
    values = {k: run.metrics.validation[-1].get(key) for k, run in enumerate(runs) if run.metrics.validation}
    found = {k: value for k, value in values.items() if value is not None}
    return min(found, key=found.__getitem__) if found else None


def _held_out(found: Record, key: str) -> str:
    """A number of an evaluation, marked where it is an upper bound."""
    value = _number(found.get(key))
    return f"\u2264 {value}" if value and found.get("upper_bound") else value


def _number(value: float | None) -> str:
    return "" if value is None else show(float(value))


# The settings of runs: first what differs, then all.


def settings_section(runs: Sequence[Run]) -> str:
    """What differs between the runs, then each run's own settings, section by section."""
    flat = [dict(_leaves(run.config)) for run in runs]
    names = dict.fromkeys(name for settings in flat for name in settings)
    compared = names.keys() - {"name", "output_dir"}
    differing = [n for n in names if n in compared and len({str(settings.get(n, "")) for settings in flat}) > 1]
    parts = ["<h2>Settings</h2>"]
    if differing:
        heads = "".join(f"<th>{dot(k)} {escape(run.name)}</th>" for k, run in enumerate(runs))
        rows = "".join(
            f"<tr><td class=setting>{escape(name)}</td>"
            f"{''.join(f'<td class=setting>{_value(settings.get(name))}</td>' for settings in flat)}</tr>"
            for name in differing
        )
        parts.append(f"<div class='card wide'><table><tr><th>differing</th>{heads}</tr>{rows}</table></div>")
    for k, (run, settings) in enumerate(zip(runs, flat, strict=True)):
        summary = f"{dot(k)} {escape(run.name)}" if len(runs) > 1 else "All settings"
        opened = " open" if len(runs) == 1 else ""
        parts.append(f"<details{opened}><summary>{summary}</summary>{_sections(settings)}</details>")
    return "\n".join(parts) if any(flat) else ""


def _sections(settings: Mapping[str, Any]) -> str:
    sections: dict[str, list[str]] = {}
    for name, value in settings.items():
        section, _, field = name.rpartition(".")
        line = f"<div><span class=setting>{escape(field)}</span><span class=setting>{_value(value)}</span></div>"
        sections.setdefault(section or "run", []).append(line)
    shown = "".join(f"<section><h4>{escape(name)}</h4>{''.join(lines)}</section>" for name, lines in sections.items())
    return f"<div class='card settings'>{shown}</div>"


def _leaves(tree: Mapping[str, Any], above: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{key}.")
        elif value is not None:
            yield f"{above}{key}", value


def _value(value: Any) -> str:
    return "" if value is None else escape(str(value).lower() if isinstance(value, bool) else str(value))


# One or several runs as one HTML page that needs nothing else: figures, charts, events, samples, settings.
#
# The charts are drawn by page/page.js from JSON that the page holds; all else is plain HTML.


_PARTS = Path(__file__).parent / "template"


def save_page(runs: Sequence[Run], output: Path) -> Path:
    """Writes the page, whole or not at all."""
    write_atomically(output, render_page(runs))
    return output


def render_page(runs: Sequence[Run]) -> str:
    """The page's HTML; runs keep their order, and a colour each."""
    panels = build_panels(runs)
    events = [events_of(run) for run in runs]
    marked = [
        {"name": run.name, "events": [vars(event) for event in found]} for run, found in zip(runs, events, strict=True)
    ]
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    body = [
        f"<header><h1>{escape(title)}</h1><p class=quiet>{escape(_subtitle(runs))}</p></header>",
        tiles(runs[0]) if len(runs) == 1 else standing(runs),
        legend(runs),
        "<div class=charts>" + "".join(_chart(panel) for panel in panels) + "</div>",
        _events(runs, events),
        _samples(runs),
        settings_section(runs),
    ]
    files = {"css": "page.css", "script": "page.js", "page": "page.html"}
    parts = {name: (_PARTS / file).read_text(encoding="utf-8") for name, file in files.items()}
    data = json.dumps({"panels": panels, "runs": marked}, allow_nan=False).replace("<", "\\u003c")
    page = Template(parts.pop("page"))
    return page.substitute(parts, title=escape(title), body="\n".join(filter(None, body)), data=data)


def _subtitle(runs: Sequence[Run]) -> str:
    return _what(runs[0]) if len(runs) == 1 else " · ".join(run.name for run in runs)


def _what(run: Run) -> str:
    """What was trained, in a line; settings that the configuration lacks are left out."""
    numbers = ("model.num_layers", "model.hidden_size", "model.vocab_size", "batch.global_size", "data.sequence_length")
    layers, width, vocabulary, rows, length = (run.number(path) for path in numbers)
    shape = f"{run.text('model.family') or 'model'}, {counted(layers, 'layer')} x {width}" if layers else None
    parts = [
        _objective(run),
        run.text("model.size") or shape,
        f"vocabulary {vocabulary:,}" if vocabulary else None,
        f"{rows} x {length} tokens a step" if rows else None,
        run.text("engine.precision"),
    ]
    return " · ".join(part for part in parts if part)


def _objective(run: Run) -> str | None:
    """Such as: headless, on next tokens for the first 50 %, vanilla for the last 20 % of the steps."""
    name = run.text("objective.name")
    causal, vanilla = (run.number(f"objective.schedule.{kind}_share") for kind in ("causal", "vanilla"))
    shares = [f"on next tokens for the first {causal:.0%}"] if causal else []
    shares += [f"vanilla for the last {vanilla:.0%}"] if vanilla else []
    return f"{', '.join([name, *shares])} of the steps" if name and shares else name


def _chart(panel: Mapping[str, Any]) -> str:
    note = " · ".join(part for part in (panel["note"], "log scale" if panel["log"] else "") if part)
    return f"<div class='card chart'><h3>{escape(panel['title'])}</h3><p>{escape(note)}</p></div>"


def _events(runs: Sequence[Run], events: Sequence[Sequence[Event]]) -> str:
    rows = [
        f"<tr><td class=number>{event.step:,}</td>{f'<td>{dot(k)} {escape(run.name)}</td>' if len(runs) > 1 else ''}"
        f"<td class={'wrong' if event.wrong else 'calm'}>{escape(event.text)}</td></tr>"
        for k, (run, found) in enumerate(zip(runs, events, strict=True))
        for event in found
    ]
    if not rows:
        return "<h2>Events</h2><p class=quiet>None: no step was skipped, nothing was resumed.</p>"
    header = f"<tr><th class=number>step</th>{'<th>run</th>' if len(runs) > 1 else ''}<th>what happened</th></tr>"
    return f"<h2>Events</h2><div class='card wide'><table>{header}{''.join(rows)}</table></div>"


def _samples(runs: Sequence[Run]) -> str:
    shown = [
        f"<div class='card sample'>{f'{dot(k)} ' if len(runs) > 1 else ''}"
        f"<b>{escape(str(sample['prompt']))}</b>{escape(str(sample['text']))}</div>"
        for k, run in enumerate(runs)
        for sample in run.samples
    ]
    return f"<h2>What it says</h2>{''.join(shown)}" if shown else ""
