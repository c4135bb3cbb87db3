"""Runs a part in a process of its own, which neither its failure, nor its hanging, nor its memory outlives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from benchmarks.gpu_report.part import Outcome, Part
from megahead.wording import duration

ROOT = Path(__file__).resolve().parents[3]
LAST_LINES = 12
_PATIENCE = 5.0
"""Seconds that a process which must end has to do so by itself."""


class Process(Protocol):
    """A command that has been started."""

    def wait(self, seconds: float) -> int:
        """Its exit code; subprocess.TimeoutExpired after so many seconds."""
        ...

    def end(self) -> None:
        """Ends it, if it has not ended, and all that it started."""
        ...


Start = Callable[[Sequence[str], Path, Path], Process]
"""From a script with its arguments, and files for what it says and what goes wrong."""


class OwnProcess:
    """An interpreter that finds this checkout, in a group of processes of its own."""

    def __init__(self, command: Sequence[str], said: Path, wrong: Path) -> None:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", "COLUMNS": "160"}
        with said.open("wb") as output, wrong.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, *command], cwd=ROOT, env=environment, stdout=output, stderr=errors,
                start_new_session=True,
            )  # fmt: skip

    def wait(self, seconds: float) -> int:
        return self._process.wait(seconds)

    def end(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_PATIENCE)


def run(part: Part, folder: Path, limit: float, start: Start = OwnProcess) -> Outcome:
    """Runs it for at most `limit` seconds; what it says and writes lies in `folder`."""
    result, said, wrong = (folder / f"{part.name}.{kind}" for kind in ("json", "txt", "errors.txt"))
    result.unlink(missing_ok=True)
    command = part.filled(result, limit)
    began = time.monotonic()
    process = start(command, said, wrong)
    try:
        code: int | None = process.wait(limit)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        process.end()
    seconds = time.monotonic() - began
    state, why = ("measured", "") if code == 0 else _what_is_wrong(code, limit, said, wrong)
    about = {"name": part.name, "question": part.question, "command": list(part.command), "called": command}
    printed = said.read_text(encoding="utf-8", errors="replace")
    return Outcome.read(
        about | {"state": state, "seconds": seconds, "why": why, "said": printed, "lines": _read(result)}
    )


def _what_is_wrong(code: int | None, limit: float, said: Path, wrong: Path) -> tuple[str, str]:
    """State and sentence; the sentence of a command that has one, else its last lines."""
    if code is None:
        return "too long", f"it had not ended after {duration(limit)}"
    if code == -signal.SIGKILL:
        return "failed", "it was killed, most likely for the machine's memory"
    lines = [line for path in (said, wrong) for line in path.read_text(errors="replace").splitlines() if line.strip()]
    told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return "failed", told[-1] if told else "\n".join([f"it ended with code {code}:", *lines[-LAST_LINES:]])


def _read(result: Path) -> list[dict[str, Any]] | None:
    try:
        lines: list[dict[str, Any]] = json.loads(result.read_text(encoding="utf-8"))
        return lines
    except (OSError, ValueError):  # it wrote none, or was ended while it did
        return None
