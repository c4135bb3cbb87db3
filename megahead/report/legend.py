"""The legend of a page: a colour for each run, buttons to hide runs, and the choice of the horizontal axis."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from megahead.report.runs import Run

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
