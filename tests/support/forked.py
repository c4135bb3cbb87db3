"""What would be a process of its own, forked from this one, which has imported everything already."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import IO, Any

FORK = multiprocessing.get_context("fork")
ROOT = Path(__file__).parents[2]


def forked(function: Callable[..., Any], *args: Any) -> Any:
    """What `function` returns, or raises; in the process's main thread, and without a process group."""
    with ProcessPoolExecutor(1, mp_context=FORK) as pool:
        return pool.submit(function, *args).result(timeout=120)


def run_script(*command: object, cwd: Path = ROOT, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """What a Python script does with its arguments, called in `cwd`."""
    words = [str(word) for word in command]
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        code = script_code(words, output, errors, cwd, timeout)
        for stream in (output, errors):
            stream.seek(0)
        return subprocess.CompletedProcess(words, code, output.read(), errors.read())


def script_code(
    command: Sequence[str], output: IO[str], errors: IO[str], cwd: Path = ROOT, timeout: float | None = None
) -> int:
    """Its exit code; what it says goes to the two files."""
    child = FORK.Process(target=_become, args=(command, output.fileno(), errors.fileno(), cwd))
    child.start()
    child.join(timeout)
    if child.exitcode is None:
        child.kill()
        raise subprocess.TimeoutExpired(command, timeout or 0)
    return child.exitcode


def _become(command: Sequence[str], output: int, errors: int, cwd: Path) -> None:
    """Runs the script in this process to its end."""
    os.chdir(cwd)
    os.dup2(output, 1)
    os.dup2(errors, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    sys.argv, sys.path[:0] = [*command], [str(Path(command[0]).parent)]
    multiprocessing.forkserver._forkserver.__init__()  # type: ignore[misc] # the parent's one does not serve this process
    code = 0
    try:
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
