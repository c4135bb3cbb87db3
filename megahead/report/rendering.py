"""One or several runs as one HTML page that needs nothing else: figures, charts, events, samples, settings.

The charts are drawn by page/page.js from JSON that the page holds; all else is plain HTML.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median
from string import Template
from typing import Any

from megahead.files import write_atomically
from megahead.report.events import Event, events_of
from megahead.report.runs import Run
from megahead.report.series import build_panels
from megahead.report.tables import show
from megahead.wording import counted, duration, thousands

_PARTS = Path(__file__).parent / "page"
_AXES = {"tokens": "tokens", "step": "steps", "seconds": "time"}


def save_page(runs: Sequence[Run], output: Path) -> Path:
    """Writes the page, whole or not at all."""
    write_atomically(output, render_page(runs))
    return output


def render_page(runs: Sequence[Run]) -> str:
    """The page's HTML; runs keep their order, and a colour each."""
    panels = build_panels([run.metrics for run in runs])
    events = [events_of(run) for run in runs]
    marked = [
        {"name": run.name, "events": [vars(event) for event in found]} for run, found in zip(runs, events, strict=True)
    ]
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    body = [
        f"<header><h1>{escape(title)}</h1><p class=quiet>{escape(_subtitle(runs))}</p></header>",
        _tiles(runs[0]) if len(runs) == 1 else _standing(runs),
        _controls(runs),
        "<div class=charts>" + "".join(_chart(panel) for panel in panels) + "</div>",
        _events(runs, events),
        _samples(runs),
        _settings(runs),
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
    size, layers, width = (run.setting(f"model.{name}") for name in ("size", "num_layers", "hidden_size"))
    parts = [
        _objective(run),
        size or (f"{run.setting('model.family', 'model')}, {counted(layers, 'layer')} x {width}" if layers else None),
        f"vocabulary {run.setting('model.vocab_size'):,}" if run.setting("model.vocab_size") else None,
        f"{run.setting('batch.global_size')} x {run.setting('data.sequence_length')} tokens a step"
        if run.setting("batch.global_size")
        else None,
        run.setting("engine.precision"),
    ]
    return " · ".join(part for part in parts if part)


def _objective(run: Run) -> str | None:
    """Such as: headless, vanilla for the last 20 % of the steps."""
    name, share = run.setting("objective.name"), run.setting("objective.schedule.vanilla_share")
    return f"{name}, vanilla for the last {share:.0%} of the steps" if name and share else name


def _figures(run: Run) -> dict[str, str]:
    """How far the run is, by names; empty if unknown."""
    training, validation = run.metrics.training, run.metrics.validation
    last = max((*training, *validation), key=lambda record: record["step"])
    held_out = validation[-1] if validation else {}
    speeds = [record["tokens_per_second"] for record in training if record.get("tokens_per_second")]
    steps = run.setting("training.steps")
    head = f" ({held_out['head']} head)" if held_out.get("head") else ""
    return {
        f"held-out perplexity{head}": _number(held_out.get("perplexity")),
        "bits per byte": _number(held_out.get("bits_per_byte")),
        "next token right": "" if held_out.get("accuracy") is None else f"{held_out['accuracy']:.1%}",
        "training loss": _number(training[-1].get("loss")) if training else "",
        f"steps{f' of {steps:,}' if steps else ''}": f"{last['step']:,}",
        "tokens read": thousands(last["tokens"]),
        "time trained": duration(last["seconds"]),
        "tokens/s (median)": thousands(median(speeds)) if speeds else "",
        "steps skipped": show(training[-1].get("skipped_steps")) if training else "",
        "ending": run.ending or "not noted",
    }


def _tiles(run: Run) -> str:
    figures = {name: value for name, value in _figures(run).items() if value}
    tiles = [
        f"<div class='card tile'><b>{escape(value)}</b><span>{escape(name)}</span></div>"
        for name, value in figures.items()
    ]
    return f"<div class=tiles>{''.join(tiles)}</div>"


def _standing(runs: Sequence[Run]) -> str:
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
        lines.append(f"<tr><td>{_dot(k)} {escape(runs[k].name)}</td>{''.join(cells)}</tr>")
    return f"<div class='card wide'><table>{''.join(lines)}</table></div>"


def _lowest(runs: Sequence[Run], key: str) -> int | None:
    values = {k: run.metrics.validation[-1].get(key) for k, run in enumerate(runs) if run.metrics.validation}
    found = {k: value for k, value in values.items() if value is not None}
    return min(found, key=found.__getitem__) if found else None


def _controls(runs: Sequence[Run]) -> str:
    keys = [f"<button class=key aria-pressed=true>{_dot(k)}{escape(run.name)}</button>" for k, run in enumerate(runs)]
    axes = [
        f"<button value={axis} aria-pressed={'true' if axis == 'tokens' else 'false'}>{name}</button>"
        for axis, name in _AXES.items()
    ]
    shown = "".join(keys) if len(runs) > 1 else ""
    across = f"<div class=across role=group aria-label='horizontal axis'>{''.join(axes)}</div>"
    return f"<div class=bar><div class=keys>{shown}</div>{across}</div>"


def _chart(panel: Mapping[str, Any]) -> str:
    note = " · ".join(part for part in (panel["note"], "log scale" if panel["log"] else "") if part)
    return f"<div class='card chart'><h3>{escape(panel['title'])}</h3><p>{escape(note)}</p></div>"


def _events(runs: Sequence[Run], events: Sequence[Sequence[Event]]) -> str:
    rows = [
        f"<tr><td class=number>{event.step:,}</td>{f'<td>{_dot(k)} {escape(run.name)}</td>' if len(runs) > 1 else ''}"
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
        f"<div class='card sample'>{f'{_dot(k)} ' if len(runs) > 1 else ''}"
        f"<b>{escape(str(sample['prompt']))}</b>{escape(str(sample['text']))}</div>"
        for k, run in enumerate(runs)
        for sample in run.samples
    ]
    return f"<h2>What it says</h2>{''.join(shown)}" if shown else ""


def _settings(runs: Sequence[Run]) -> str:
    """What differs between the runs, then each run's own settings, section by section."""
    flat = [dict(_leaves(run.config)) for run in runs]
    names = dict.fromkeys(name for settings in flat for name in settings)
    compared = names.keys() - {"name", "output_dir"}
    differing = [n for n in names if n in compared and len({str(settings.get(n, "")) for settings in flat}) > 1]
    parts = ["<h2>Settings</h2>"]
    if differing:
        heads = "".join(f"<th>{_dot(k)} {escape(run.name)}</th>" for k, run in enumerate(runs))
        rows = "".join(
            f"<tr><td class=setting>{escape(name)}</td>"
            f"{''.join(f'<td class=setting>{_value(settings.get(name))}</td>' for settings in flat)}</tr>"
            for name in differing
        )
        parts.append(f"<div class='card wide'><table><tr><th>differing</th>{heads}</tr>{rows}</table></div>")
    for k, (run, settings) in enumerate(zip(runs, flat, strict=True)):
        summary = f"{_dot(k)} {escape(run.name)}" if len(runs) > 1 else "All settings"
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


def _number(value: float | None) -> str:
    return "" if value is None else show(float(value))


def _dot(run: int) -> str:
    """A run's colour; from the ninth on a ring, whose line is dashed."""
    kind = "dot ring" if run >= 8 else "dot"
    return f"<span class='{kind}' style='--its:var(--run-{run % 8})'></span>"
