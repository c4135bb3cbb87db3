"""One or several runs as one HTML page that needs nothing else: figures, charts, events, samples, settings.

The charts are drawn by page/page.js from JSON that the page holds; all else is plain HTML.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from megahead.files import write_atomically
from megahead.report.events import Event, events_of
from megahead.report.legend import dot, legend
from megahead.report.runs import Run
from megahead.report.series import build_panels
from megahead.report.settings import settings_section
from megahead.report.standing import standing, tiles
from megahead.wording import counted

_PARTS = Path(__file__).parent / "page"


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
