"""The page: what was found at a glance, then every part with its command and what it printed."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_report.part import Outcome
from benchmarks.gpu_report.steps import steps_compared
from benchmarks.gpu_report.targets import judged
from benchmarks.gpu_report.trainings import trainings_compared
from megahead.report.tables import to_markdown
from megahead.wording import duration

LONGEST = 20_000
"""Characters of what a part printed that stand on the page."""


def page_of(title: str, machine: Mapping[str, str], outcomes: Sequence[Outcome], folder: Path) -> str:
    """Markdown. `folder`: where trainings left their logs."""
    parts = [outcome for outcome in outcomes if outcome.state == "measured"]
    blocks = [
        f"# {title}\n",
        to_markdown([{"": name, "is": value} for name, value in machine.items()]),
        _headed("Targets", judged(outcomes)),
        _headed("Steps, headless against vanilla", steps_compared(outcomes)),
        _headed("Trainings, headless against vanilla", trainings_compared(folder, [part.name for part in parts])),
        _headed("All parts", [_in_short(outcome) for outcome in outcomes]),
        *map(_at_length, outcomes),
    ]
    return "\n".join(block for block in blocks if block)


def _headed(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    return f"## {title}\n\n{to_markdown(rows)}" if rows else ""


def _in_short(outcome: Outcome) -> dict[str, str]:
    why = outcome.why.splitlines()[0] if outcome.why else ""
    return {"part": outcome.name, "state": outcome.state, "took": duration(outcome.seconds), "because": why}


def _at_length(outcome: Outcome) -> str:
    command = shlex.join(["python", *(outcome.called or outcome.command)])
    said = outcome.said[-LONGEST:].strip("\n")
    wrong = f"\n{outcome.why}" if outcome.why else ""
    return f"## {outcome.name}: {outcome.question}\n\n```console\n$ {command}\n{said}{wrong}\n```\n"
