"""Does the parts one after the other within a budget of time, and keeps what came of them after each."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from benchmarks.gpu_report.machine import described
from benchmarks.gpu_report.page import page_of
from benchmarks.gpu_report.part import START_UP, Outcome, Part
from benchmarks.gpu_report.running import OwnProcess, Start, run
from benchmarks.gpu_report.targets import falls_short
from megahead.files import write_atomically
from megahead.wording import duration

ON_A_GPU, DRY_RUN = "Measured on a GPU", "A dry run on a CPU: no number here says anything about a GPU"
LEAST = 20.0
"""Seconds without which no part is begun."""


class Session:
    """Works in `folder`; what was measured there by the same command before is not measured again, unless `again`."""

    def __init__(
        self, folder: Path, console: Console, *, title: str = ON_A_GPU, again: bool = False, start: Start = OwnProcess
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.console, self._title, self._start = folder, console, title, start
        self.outcomes = {} if again else _measured_before(folder / "report.json")
        self._machine = described()

    def do(self, parts: Sequence[Part], seconds: float) -> None:
        """Does them within so many seconds, and writes `report.json` and `report.md` after each."""
        deadline = time.monotonic() + seconds
        todo = [part for part in parts if not self._has(part)]
        if len(todo) < len(parts):
            self.console.print(f"{len(parts) - len(todo)} of {len(parts)} parts are there from an earlier call")
        for number, part in enumerate(todo, 1):
            left = deadline - time.monotonic()
            doing = f"[{number}/{len(todo)}] {part.name}: {part.question} {_outlook(part, left)}"
            self.console.print(doing, markup=False, soft_wrap=True)
            outcome = self._outcome(part, left, todo[number - 1 :])
            self.outcomes[part.name] = outcome
            self._save()
            tail = f": {outcome.why}" if outcome.why else ""
            self.console.print(f"    {outcome.state}, {duration(outcome.seconds)}{tail}", markup=False, soft_wrap=True)
        self._save()

    def _outcome(self, part: Part, left: float, to_come: Sequence[Part]) -> Outcome:
        """`to_come`: parts from this one on."""
        if lack := part.lacks():
            return Outcome.left_out(part, lack)
        if part.explains and not falls_short(part.explains, list(self.outcomes.values())):
            return Outcome.left_out(part, f"{part.explains} has nothing to explain: its targets were met.")
        limit = min(left, _kept_for(part, left, to_come) if part.shares else 2 * part.seconds)
        if limit < (LEAST + START_UP if part.shares else LEAST):
            return Outcome.left_out(part, f"no time was left for it; {duration(max(left, 0))} were.")
        return run(part, self.folder, limit, self._start)

    def _has(self, part: Part) -> bool:
        found = self.outcomes.get(part.name)
        return found is not None and found.command == list(part.command)

    def _save(self) -> None:
        outcomes = list(self.outcomes.values())
        content = {"machine": self._machine, "parts": [asdict(outcome) for outcome in outcomes]}
        write_atomically(self.folder / "report.json", json.dumps(content, indent=1) + "\n")
        write_atomically(self.folder / "report.md", page_of(self._title, self._machine, outcomes, self.folder))


def _kept_for(part: Part, left: float, to_come: Sequence[Part]) -> float:
    """What a part takes that takes what it is given."""
    spare = left - sum(other.seconds for other in to_come)
    return part.seconds + max(spare, 0) / sum(other.shares for other in to_come)


def _outlook(part: Part, left: float) -> str:
    takes = "takes what it is given" if part.shares else f"about {duration(part.seconds)}"
    return f"({takes}; {duration(max(left, 0))} left)"


def _measured_before(report: Path) -> dict[str, Outcome]:
    try:
        parts = json.loads(report.read_text(encoding="utf-8"))["parts"]
    except (OSError, ValueError, KeyError):
        return {}
    outcomes = [Outcome.read(part) for part in parts]
    return {outcome.name: outcome for outcome in outcomes if outcome.state == "measured"}
