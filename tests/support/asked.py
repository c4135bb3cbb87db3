"""Run as a script: asks commands something, each in a fork of one bare interpreter, and tells what it cost to answer.

Reads a JSON list of command lines (a script or `megahead`, and its arguments), and writes a list of their answers.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megahead.errors import SLOW_PACKAGES

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Answer:
    """What a command did with its arguments."""

    code: int
    said: str
    """Output and errors."""

    heavy: list[str]
    """Which of the heavy packages it had imported by then."""

    cpu_seconds: float
    """Beside those of what is imported once for all."""


def ask(commands: Sequence[Sequence[str]], folder: Path) -> list[Answer]:
    """The answers of scripts (named from the repository's root) or of `megahead`, called in `folder`."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps([list(command) for command in commands]),
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        check=True,
    )
    return [Answer(**answer) for answer in json.loads(done.stdout)]


def _answer(command: Sequence[str]) -> dict[str, Any]:
    """What a fork of this process does with it."""
    reader, writer = os.pipe()
    with tempfile.TemporaryFile("w+") as said, os.fdopen(reader) as imported:
        child = os.fork()
        if child == 0:
            _become(command, said.fileno(), writer)
        os.close(writer)
        heavy = imported.read().split()
        _, status, used = os.wait4(child, 0)
        said.seek(0)
        seconds = used.ru_utime + used.ru_stime
        return {"code": os.waitstatus_to_exitcode(status), "said": said.read(), "heavy": heavy, "cpu_seconds": seconds}


def _become(command: Sequence[str], said: int, writer: int) -> None:
    """Runs the script in this process to its end, which is told what was imported."""
    leave = os._exit  # some commands call it themselves

    def ended(code: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(writer, " ".join(name for name in SLOW_PACKAGES if name in sys.modules).encode())
        leave(code)

    os._exit = ended  # type: ignore[assignment]
    os.dup2(said, 1)
    os.dup2(said, 2)
    name, *arguments = command
    sys.argv = [name, *arguments]
    try:
        if name == "megahead":
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str((ROOT / name).parent)
            runpy.run_path(str(ROOT / name), run_name="__main__")
    except SystemExit as stopped:
        ended(int(stopped.code or 0))
    except BaseException:
        traceback.print_exc()
        ended(1)
    ended(0)


if __name__ == "__main__":
    for light in ("numpy", "rich.console", "megahead.config.loading", "megahead.data.preprocess"):  # once for all forks
        importlib.import_module(light)
    print(json.dumps([_answer(command) for command in json.load(sys.stdin)]))
