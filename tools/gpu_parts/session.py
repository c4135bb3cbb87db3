"""Runs the parts of tools/gpu_report.py within a time budget, each in its own process.

It does not import torch, which would take GPU memory.
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

from gpu_parts.page import render_page
from gpu_parts.plan import STARTUP_SECONDS, Outcome, Part, State
from megahead import __version__
from megahead.files import write_atomically
from megahead.wording import format_duration

PACKAGES = (
    *("torch", "triton", "deepspeed", "transformers"),
    *("liger-kernel", "cut-cross-entropy", "flash-attn", "flash-attn-4"),
)


def describe_machine() -> dict[str, str]:
    """Date, GPU and versions by name, without importing torch."""
    description = {"date": datetime.now(UTC).isoformat(timespec="minutes"), "Python": platform.python_version()}
    commands = {
        "GPU": ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"),
        "megahead": ("git", "describe", "--always", "--dirty"),
    }
    for name, command in commands.items():
        description[name] = "unknown"
        with suppress(OSError, subprocess.SubprocessError):
            result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
            description[name] = result.stdout.strip()
    description["megahead"] = f"{__version__}, {description['megahead']}"
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            description[name] = importlib.metadata.version(name)
    return description


ROOT = Path(__file__).resolve().parents[2]
LAST_LINES = 12
_TERM_GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL


# (script and arguments, file for stdout, file for stderr, time limit) -> exit code
Launch = Callable[[Sequence[str], Path, Path, float], int | None]


def launch(command: Sequence[str], stdout_path: Path, stderr_path: Path, limit: float) -> int | None:
    """Runs Python on `command` in this checkout; returns the exit code, or None after `limit` seconds.

    It has its own process group, which is killed at the end.
    """
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", "COLUMNS": "160"}
    with stdout_path.open("wb") as output, stderr_path.open("wb") as errors:
        options: Any = {"stdout": output, "stderr": errors, "env": environment, "cwd": ROOT}
        process = subprocess.Popen([sys.executable, *command], start_new_session=True, **options)
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal_number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_TERM_GRACE_SECONDS)


def run_part(part: Part, folder: Path, limit: float, launch: Launch = launch) -> Outcome:
    """Runs `part` for at most `limit` seconds; its output and result go to files in `folder`."""
    result, stdout_path, stderr_path = (folder / f"{part.name}.{suffix}" for suffix in ("json", "txt", "errors.txt"))
    result.unlink(missing_ok=True)
    command, start, lines = part.fill_command(result, limit), time.monotonic(), None
    code = launch(command, stdout_path, stderr_path, limit)
    seconds = time.monotonic() - start
    with suppress(OSError, ValueError):  # no result, or an incomplete one
        lines = json.loads(result.read_text(encoding="utf-8"))
    state: State = "measured"
    why = ""
    if code != 0:
        state, why = _describe_failure(code, limit, stdout_path, stderr_path)
    output = stdout_path.read_text(encoding="utf-8", errors="replace")
    return part.outcome(state, why=why, seconds=seconds, called=command, said=output, lines=lines)


def _describe_failure(code: int | None, limit: float, stdout_path: Path, stderr_path: Path) -> tuple[State, str]:
    """The state and a sentence: the command's `error: ...` line, else its last lines."""
    if code is None:
        return "too long", f"it had not ended after {format_duration(limit)}"
    if code == -signal.SIGKILL:
        return "failed", "it was killed, most likely for the machine's memory"
    texts = [path.read_text(errors="replace") for path in (stdout_path, stderr_path)]
    lines = [line for text in texts for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return "failed", errors[-1] if errors else "\n".join([f"it ended with code {code}:", *lines[-LAST_LINES:]])


ON_A_GPU, DRY_RUN = "Measured on a GPU", "A dry run on a CPU: no number here says anything about a GPU"
MIN_SECONDS = 20.0  # the least for which a part is started


class Session:
    """Runs parts in `folder`; reuses what the same command measured there before, unless `again`."""

    def __init__(
        self, folder: Path, console: Console, *, title: str = ON_A_GPU, again: bool = False, launch: Launch = launch
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.console, self._title, self._launch = folder, console, title, launch
        self._report, self._machine = folder / "report.json", describe_machine()
        earlier = [] if again or not self._report.exists() else json.loads(self._report.read_bytes())["parts"]
        self.outcomes = {part["name"]: Outcome(**part) for part in earlier if part["state"] == "measured"}

    def run_parts(self, parts: Sequence[Part], seconds: float) -> None:
        """Runs `parts` within so many seconds, and writes `report.json` and `report.md` after each."""
        deadline = time.monotonic() + seconds
        measured = {(outcome.name, *outcome.command) for outcome in self.outcomes.values()}
        todo = [part for part in parts if (part.name, *part.command) not in measured]
        if len(todo) < len(parts):
            self._print(f"{len(parts) - len(todo)} of {len(parts)} parts are there from an earlier call")
        for index, part in enumerate(todo, 1):
            seconds_left = deadline - time.monotonic()
            takes = "takes the time left" if part.uses_spare_time else f"about {format_duration(part.seconds)}"
            left = format_duration(max(seconds_left, 0))
            self._print(f"▸ {part.name} [{index}/{len(todo)}] {part.question} ({takes}; {left} left)")
            outcome = self.outcomes[part.name] = self._run_part(part, seconds_left, todo[index - 1 :])
            mark, why = ("✓", "") if outcome.state == "measured" else ("✗", f": {outcome.why}")
            self._print(f"{mark} {part.name} {outcome.state} ({format_duration(outcome.seconds)}){why}")
            self._save()
        self._save()

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def _run_part(self, part: Part, seconds_left: float, upcoming: Sequence[Part]) -> Outcome:
        """Runs `part`, or leaves it out; `upcoming`: parts from this one on."""
        if reason := part.missing_requirement():
            return part.outcome("left out", why=reason)
        reserved, least = 2 * part.seconds, MIN_SECONDS
        if part.uses_spare_time:  # spare time is split among such parts
            spare = seconds_left - sum(other.seconds for other in upcoming)
            reserved = part.seconds + max(spare, 0) / sum(other.uses_spare_time for other in upcoming)
            least += STARTUP_SECONDS
        limit = min(seconds_left, reserved)
        if limit < least:
            left = format_duration(max(seconds_left, 0))
            return part.outcome("left out", why=f"no time was left for it; {left} were.")
        return run_part(part, self.folder, limit, self._launch)

    def _save(self) -> None:
        outcomes = list(self.outcomes.values())
        content = {"machine": self._machine, "parts": [asdict(outcome) for outcome in outcomes]}
        write_atomically(self._report, json.dumps(content, indent=1) + "\n")
        write_atomically(self.folder / "report.md", render_page(self._title, self._machine, outcomes, self.folder))
