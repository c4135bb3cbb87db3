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
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

FORK = multiprocessing.get_context("fork")
ROOT = Path(__file__).parents[2]


def forked(function: Callable[..., Any], *args: Any) -> Any:
    """What `function` returns, or raises; in the process's main thread, and without a process group."""
    with ProcessPoolExecutor(1, mp_context=FORK) as pool:
        return pool.submit(function, *args).result(timeout=120)


def run_script(*command: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """What a Python script does with its arguments, called in `cwd`."""
    return Script(*command, cwd=cwd).done()


class Script:
    """One that has been started; `environment` comes on top of this process's own."""

    def __init__(self, *command: object, cwd: Path = ROOT, environment: Mapping[str, str] | None = None) -> None:
        self.command = [str(word) for word in command]
        self._cwd, self._environment = cwd, environment or {}
        self._said = [tempfile.TemporaryFile("w+") for _ in range(2)]  # noqa: SIM115 - closed by `done`
        self._process = FORK.Process(target=self._become)
        self._process.start()

    def done(self, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Waits for its end."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self._process.kill()
            raise subprocess.TimeoutExpired(self.command, timeout)
        for stream in self._said:
            stream.seek(0)
        output, errors = (stream.read() for stream in self._said)
        for stream in self._said:
            stream.close()
        return subprocess.CompletedProcess(self.command, self._process.exitcode, output, errors)

    def _become(self) -> None:
        os.chdir(self._cwd)
        os.environ.update(self._environment)
        for number, stream in enumerate(self._said, 1):
            os.dup2(stream.fileno(), number)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
        sys.argv, sys.path[:0] = self.command, [str(Path(self.command[0]).parent)]
        multiprocessing.forkserver._forkserver.__init__()  # type: ignore[misc] # the parent's serves no other process
        code = _code(self.command[0])
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _code(script: str) -> int:
    """How it exits."""
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
