"""What would be a process of its own, forked from this one, which has imported everything already."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest

FORK = multiprocessing.get_context("fork")
ROOT = Path(__file__).parents[2]
FORKED_SECONDS = 120.0


def forked(function: Callable[..., Any], *args: Any) -> Any:
    """What `function` returns, or raises; in the process's main thread, and without a process group."""
    with ProcessPoolExecutor(1, mp_context=FORK) as pool:
        result = pool.submit(function, *args)
        try:
            return result.result(timeout=FORKED_SECONDS)
        except TimeoutError:  # of a process that hangs, which the pool would wait for
            for process in pool._processes.values():
                process.kill()
            raise


def run_script(*command: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """What a Python script does with its arguments, called in `cwd`."""
    return Script(*command, cwd=cwd).done()


class Script:
    """One that has been started; `environment` comes on top of this process's own."""

    def __init__(self, *command: object, cwd: Path = ROOT, environment: Mapping[str, str] | None = None) -> None:
        self.command = [str(word) for word in command]
        self._cwd, self._environment = cwd, environment or {}
        self._said = [tempfile.TemporaryFile("w+") for _ in range(2)]  # noqa: SIM115 - closed by `done`
        self._process = FORK.Process(target=self._start)
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

    def _start(self) -> None:
        os.chdir(self._cwd)
        os.environ.update(self._environment)
        for number, stream in enumerate(self._said, 1):
            os.dup2(stream.fileno(), number)
        _become(self.command)


def fork_pythons(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on scripts and modules that `subprocess` would start an interpreter for, and those that they start, are
    forks: a launcher's ranks, say, each of which takes four CPU seconds to import what is here already."""
    start: Callable[..., None] = subprocess.Popen.__init__

    def fork(self: Any, args: Any, *rest: Any, env: Mapping[str, str] | None = None, **options: Any) -> None:
        if command := _program(args):
            options["preexec_fn"] = partial(_become_another, command, env)  # never returns, hence never executes `args`
        start(self, args, *rest, env=env, **options)

    monkeypatch.setattr(subprocess.Popen, "__init__", fork)


def _program(args: Any) -> list[str]:
    """The script, or `-m` and the module, that an interpreter would run; nothing if it is given options of its own."""
    words = [] if isinstance(args, str | bytes | Path) else [str(word) for word in args]
    if words[:1] != [sys.executable]:
        return []
    command = words[2:] if words[1:2] == ["-u"] else words[1:]
    return command if command[:1] == ["-m"] or not command[0].startswith("-") else []


def _become_another(command: list[str], environment: Mapping[str, str] | None) -> NoReturn:
    """As a fresh interpreter would be, in the folder and with the streams that it was given: without this one's open
    files, environment and handlers of signals."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in [int(entry.name) for entry in Path("/dev/fd").iterdir()]:
        if number > 2:
            os.dup2(nowhere, number)  # not closed: objects of the parent would close what is opened in their places
    for handled in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(handled, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # each Python does; `subprocess` resets them
        signal.signal(ignored, signal.SIG_IGN)
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
    _become(command)


def _become(command: list[str]) -> NoReturn:
    """Runs a script, or a module after `-m`, with its arguments, to this process's end."""
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    multiprocessing.forkserver._forkserver.__init__()  # type: ignore[misc] # the parent's serves no other process
    code = _code(command)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _code(command: list[str]) -> int:
    """How it exits."""
    try:
        if command[0] == "-m":
            sys.argv = command[1:]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[:0] = command, [str(Path(command[0]).parent)]
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
