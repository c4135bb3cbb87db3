"""How far runs are: tiles for one run, a table for several."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from statistics import median

from megahead.report.legend import dot
from megahead.report.metrics import Record
from megahead.report.runs import Run
from megahead.report.tables import show
from megahead.wording import duration, thousands


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
