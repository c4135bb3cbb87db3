"""Does the parts of tools/gpu_report.py within a budget of time, each in a process of its own.

It imports no torch, which would take memory of the GPU.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from gpu_parts.page import falls_short, page_of
from gpu_parts.plan import START_UP, Outcome, Part, State
from megahead.files import write_atomically
from megahead.version import __version__
from megahead.wording import format_duration
from steps.once import Once

PACKAGES = (
    *("torch", "triton", "deepspeed", "transformers"),
    *("liger-kernel", "cut-cross-entropy", "flash-attn", "flash-attn-4"),
)


def described() -> dict[str, str]:
    """What it is measured on, by name, found out without importing torch, which would take memory of the GPU."""
    found = {"date": datetime.now(UTC).isoformat(timespec="minutes"), "Python": platform.python_version()}
    commands = {
        "GPU": ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"),
        "megahead": ("git", "describe", "--always", "--dirty"),
    }
    for name, command in commands.items():
        found[name] = "unknown"
        with suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
            found[name] = done.stdout.strip()
    found["megahead"] = f"{__version__}, {found['megahead']}"
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


ROOT = Path(__file__).resolve().parents[2]
LAST_LINES = 12
_PATIENCE = 5.0  # seconds that a process which must end has to do so by itself


# Runs a script with its arguments; files for what it says and what goes wrong; seconds it may take
Launch = Callable[[Sequence[str], Path, Path, float], int | None]


def launch(command: Sequence[str], said: Path, wrong: Path, limit: float) -> int | None:
    """Exit code of an interpreter that finds this checkout; None where it had not ended after `limit` seconds.

    It has a group of processes of its own, all of which are ended with it.
    """
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", "COLUMNS": "160"}
    with said.open("wb") as output, wrong.open("wb") as errors:
        told: Any = {"stdout": output, "stderr": errors, "env": environment, "cwd": ROOT}
        process = subprocess.Popen([sys.executable, *command], start_new_session=True, **told)
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_PATIENCE)


def run(part: Part, folder: Path, limit: float, launch: Launch = launch) -> Outcome:
    """Runs it for at most `limit` seconds; what it says and writes lies in `folder`."""
    result, said, wrong = (folder / f"{part.name}.{kind}" for kind in ("json", "txt", "errors.txt"))
    result.unlink(missing_ok=True)
    command, began, lines = part.filled(result, limit), time.monotonic(), None
    code = launch(command, said, wrong, limit)
    seconds = time.monotonic() - began
    with suppress(OSError, ValueError):  # it wrote none, or was ended while it did
        lines = json.loads(result.read_text(encoding="utf-8"))
    state: State = "measured"
    why = ""
    if code != 0:
        state, why = _what_is_wrong(code, limit, said, wrong)
    printed = said.read_text(encoding="utf-8", errors="replace")
    return part.outcome(state, why=why, seconds=seconds, called=command, said=printed, lines=lines)


def _what_is_wrong(code: int | None, limit: float, said: Path, wrong: Path) -> tuple[State, str]:
    """State and sentence; the sentence of a command that has one, else its last lines."""
    if code is None:
        return "too long", f"it had not ended after {format_duration(limit)}"
    if code == -signal.SIGKILL:
        return "failed", "it was killed, most likely for the machine's memory"
    lines = [line for path in (said, wrong) for line in path.read_text(errors="replace").splitlines() if line.strip()]
    told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return "failed", told[-1] if told else "\n".join([f"it ended with code {code}:", *lines[-LAST_LINES:]])


ON_A_GPU, DRY_RUN = "Measured on a GPU", "A dry run on a CPU: no number here says anything about a GPU"
LEAST = 20.0  # seconds without which no part is begun


class NotMeasured(Exception):
    """Passes on the outcome of a part that shall run again in the next call."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.why)
        self.outcome = outcome


class Session:
    """Works in `folder`; what was measured there by the same command before is not measured again, unless `again`."""

    def __init__(
        self, folder: Path, console: Console, *, title: str = ON_A_GPU, again: bool = False, launch: Launch = launch
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.console, self._title, self._launch = folder, console, title, launch
        self._once = Once(folder / "measured", console)
        if again:
            self._once.forget()
        self.outcomes = {name: Outcome(**outcome) for name, outcome in self._once.results().items()}
        self._machine = described()

    def do(self, parts: Sequence[Part], seconds: float) -> None:
        """Does them within so many seconds, and writes `report.json` and `report.md` after each."""
        deadline = time.monotonic() + seconds
        there = {(outcome.name, *outcome.command) for outcome in self.outcomes.values()}
        todo = [part for part in parts if (part.name, *part.command) not in there]
        if len(todo) < len(parts):
            self._say(f"{len(parts) - len(todo)} of {len(parts)} parts are there from an earlier call")
        for number, part in enumerate(todo, 1):
            left = deadline - time.monotonic()
            takes = "takes what it is given" if part.shares else f"about {format_duration(part.seconds)}"
            about = f"[{number}/{len(todo)}] {part.question} ({takes}; {format_duration(max(left, 0))} left)"
            outcome = self.outcomes[part.name] = self._outcome(part, left, todo[number - 1 :], about)
            self._save()
            if outcome.state != "measured":
                self._say(f"✗ {part.name} {outcome.state} ({format_duration(outcome.seconds)}): {outcome.why}")
        self._save()

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def _outcome(self, part: Part, left: float, to_come: Sequence[Part], about: str) -> Outcome:
        """`to_come`: parts from this one on."""
        if lack := part.lacks():
            return part.outcome("left out", why=lack)
        if part.explains and not falls_short(part.explains, list(self.outcomes.values())):
            return part.outcome("left out", why=f"{part.explains} has nothing to explain: its targets were met.")
        kept = 2 * part.seconds
        if part.shares:  # what nothing needs is shared by those that take what they are given
            spare = left - sum(other.seconds for other in to_come)
            kept = part.seconds + max(spare, 0) / sum(other.shares for other in to_come)
        limit = min(left, kept)
        if limit < (LEAST + START_UP if part.shares else LEAST):
            return part.outcome("left out", why=f"no time was left for it; {format_duration(max(left, 0))} were.")

        def work() -> dict[str, Any]:
            outcome = run(part, self.folder, limit, self._launch)
            if outcome.state != "measured":
                raise NotMeasured(outcome)
            return asdict(outcome)

        settings = {"command": list(part.command)}
        try:
            done = self._once.run(part.name, work, settings=settings, about=about, say=lambda _: "measured")
        except NotMeasured as failed:
            return failed.outcome
        return Outcome(**done.result)

    def _save(self) -> None:
        outcomes = list(self.outcomes.values())
        content = {"machine": self._machine, "parts": [asdict(outcome) for outcome in outcomes]}
        write_atomically(self.folder / "report.json", json.dumps(content, indent=1) + "\n")
        write_atomically(self.folder / "report.md", page_of(self._title, self._machine, outcomes, self.folder))
