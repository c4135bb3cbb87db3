"""Named steps that run once: what a step came to is kept in a record, and a later call reads it.

A record `NAME.json` is removed before its step runs and written when it has finished, so that a step which was killed
runs again. It holds for the same settings and unchanged files, also after all of them moved together.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from megahead.files import write_atomically
from megahead.wording import format_duration


@contextmanager
def one_at_a_time(output: Path) -> Iterator[None]:
    """Waits until no other process makes `output`, at the longest until that process ends."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with _lock_of(output).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _lock_of(output: Path) -> Path:
    return output.with_name(f".{output.name}.lock")


@dataclass(frozen=True)
class Finished:
    """How a step ended: `seconds` is what its work took, in this call or in the one that is reused."""

    name: str
    seconds: float
    result: Any  # of JSON's types
    reused: bool = False


class Once:
    """Runs steps one after the other, prints what it does, and keeps their records in `folder`."""

    def __init__(self, folder: Path, console: Console) -> None:
        self.folder, self.console = folder, console
        self.finished: list[Finished] = []

    def run(
        self,
        name: str,
        work: Callable[[], Any],
        *,
        settings: Mapping[str, Any] | None = None,
        inputs: Sequence[Path] = (),
        outputs: Sequence[Path] = (),
        about: str = "",
        say: Callable[[Any], str] = str,
    ) -> Finished:
        """Does `work`, which returns its result, or reuses an earlier run of it; `about` and what `say` makes of the
        result are printed. What `work` raises is passed on, and nothing is kept.

        Reused when `settings` (JSON values), and size and time of every file in `inputs`, are what they were, and those
        of `outputs` have not changed since. Another process that runs the same step is waited for.
        """
        record = self.folder / f"{name}.json"
        key = self._key(settings, inputs)
        with one_at_a_time(record):
            finished = self._reuse(name, key, outputs)
            if finished is None:
                record.unlink(missing_ok=True)
                self._print(("▸", "cyan"), name, about)
                start, result = time.monotonic(), work()
                finished = Finished(name, time.monotonic() - start, result)
                content = {"key": key, "outputs": self._files(outputs), "seconds": finished.seconds, "result": result}
                write_atomically(record, json.dumps(content, indent=1) + "\n")
        self.finished.append(finished)
        note = (
            f"{'reused' if finished.reused else 'done'} ({format_duration(finished.seconds)}): {say(finished.result)}"
        )
        self._print(("✓", "green"), name, note)
        return finished

    def known(self, name: str) -> bool:
        """Whether the step was ever begun here, also where it was killed."""
        record = self.folder / f"{name}.json"
        return record.exists() or _lock_of(record).exists()

    def results(self) -> dict[str, Any]:
        """Of every step that has a record, by name."""
        names = sorted(record.stem for record in self.folder.glob("*.json"))
        return {name: record["result"] for name in names if (record := self._record(name)) is not None}

    def forget(self) -> None:
        """Removes all records, so that every step runs again."""
        for record in self.folder.glob("*.json"):
            record.unlink()

    def _print(self, sign: tuple[str, str], name: str, note: str) -> None:
        self.console.print(Text.assemble(sign, " ", (name, "bold"), f" {note}".rstrip()), soft_wrap=True)

    def _key(self, settings: Mapping[str, Any] | None, inputs: Sequence[Path]) -> str:
        content = json.dumps([settings or {}, self._files(inputs)], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def _reuse(self, name: str, key: str, outputs: Sequence[Path]) -> Finished | None:
        record = self._record(name)
        if record is None or (record["key"], record["outputs"]) != (key, self._files(outputs)):
            return None
        return Finished(name, record["seconds"], record["result"], reused=True)

    def _record(self, name: str) -> dict[str, Any] | None:
        """None for a step that never ended, and where the record is damaged or of another kind."""
        with suppress(OSError, ValueError):
            record = json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))
            if isinstance(record, dict) and record.keys() >= {"key", "outputs", "seconds", "result"}:
                return record
        return None

    def _files(self, paths: Sequence[Path]) -> str:
        """A hash of path, size and time of every file that `paths` name or contain; a missing one has size -1."""
        found = list[tuple[str, int, int]]()
        for path in paths:
            for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
                if not file.is_dir():
                    status = file.stat() if file.exists() else None
                    size, changed = (status.st_size, status.st_mtime_ns) if status else (-1, 0)
                    found.append((os.path.relpath(file, self.folder), size, changed))
        return hashlib.sha256(json.dumps(found).encode()).hexdigest()
