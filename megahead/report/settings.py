"""The settings of runs: first what differs, then all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from megahead.report.legend import dot
from megahead.report.runs import Run


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
