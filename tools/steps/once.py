"""Named steps that run once: the result of a step is kept in a record, which a later call reuses.

A record `NAME.json` is removed before its step runs and written when it has finished, so that a step which was killed
runs again. It is valid for the same settings and unchanged files, also after all of them moved together.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from megahead.files import write_atomically
from megahead.wording import format_duration


@contextmanager
def output_lock(output: Path) -> Iterator[None]:
    """Holds the lock of `output`, so that only one process makes it; waits while another process has it."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.with_name(f".{output.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@dataclass(frozen=True)
class FinishedStep:
    """The result of a step; `seconds` is the time of its work, in this call or in the reused one."""

    name: str
    seconds: float
    result: Any  # of JSON's types
    reused: bool = False
    description: str = ""  # of the result


class StepRunner:
    """Runs steps one after the other, prints their progress, and keeps their records in `folder`."""

    def __init__(self, folder: Path, console: Console) -> None:
        self.folder, self.console = folder, console
        self.finished: list[FinishedStep] = []

    def run(
        self,
        name: str,
        work: Callable[[], Any],
        *,
        settings: Mapping[str, Any] | None = None,
        inputs: Sequence[Path] = (),
        outputs: Sequence[Path] = (),
        describe_result: Callable[[Any], str] = str,
    ) -> FinishedStep:
        """Runs `work`, which returns its result, or reuses the result of an earlier run.

        Prints `describe_result(result)` after. Nothing is recorded if `work` raises. A result is reused if `settings`
        (JSON values) and sizes and modification times of all files in `inputs` are the same, and those of `outputs`
        have not changed since. Waits while another process runs the same step.
        """
        record = self.folder / f"{name}.json"
        key = self._key(settings, inputs)
        with output_lock(record):
            finished = self._find_reusable(name, key, outputs)
            if finished is None:
                record.unlink(missing_ok=True)
                self._print(("▸", "cyan"), name, "")
                start, result = time.monotonic(), work()
                finished = FinishedStep(name, time.monotonic() - start, result)
                content: dict[str, Any] = {"key": key, "outputs": self._files_hash(outputs)}
                content |= {"seconds": finished.seconds, "result": result}
                write_atomically(record, json.dumps(content, indent=1) + "\n")
        finished = replace(finished, description=describe_result(finished.result))
        self.finished.append(finished)
        state = "reused" if finished.reused else "done"
        note = f"{state} ({format_duration(finished.seconds)}): {finished.description}"
        self._print(("✓", "green"), name, note)
        return finished

    def _print(self, symbol: tuple[str, str], name: str, note: str) -> None:
        self.console.print(Text.assemble(symbol, " ", (name, "bold"), f" {note}".rstrip()), soft_wrap=True)

    def _key(self, settings: Mapping[str, Any] | None, inputs: Sequence[Path]) -> str:
        content = json.dumps([settings or {}, self._files_hash(inputs)], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def _find_reusable(self, name: str, key: str, outputs: Sequence[Path]) -> FinishedStep | None:
        """The earlier result; None if its record is missing, damaged or of another key, or if outputs have changed."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))
            if (record["key"], record["outputs"]) == (key, self._files_hash(outputs)):
                return FinishedStep(name, record["seconds"], record["result"], reused=True)
        return None

    def _files_hash(self, paths: Sequence[Path]) -> str:
        """A hash of path, size and modification time of all files in `paths` and below; a missing one has size -1."""
        stats = list[tuple[str, int, int]]()
        for path in paths:
            for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
                if not file.is_dir():
                    status = file.stat() if file.exists() else None
                    size, modified_ns = (status.st_size, status.st_mtime_ns) if status else (-1, 0)
                    stats.append((os.path.relpath(file, self.folder), size, modified_ns))
        return hashlib.sha256(json.dumps(stats).encode()).hexdigest()
