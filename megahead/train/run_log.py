"""A run's `metrics.jsonl`, to which each of its sessions appends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from megahead.errors import UserError
from megahead.train.state import TrainingState


class RunLog:
    """Writes an object a line, each of them at once; a last line that a killed session left unfinished is removed."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open("ab+")
        self._file.seek(0)
        self._file.truncate(self._file.read().rfind(b"\n") + 1)

    def record(self, state: TrainingState, fields: Mapping[str, Any]) -> None:
        """What happened (`fields`), and how far the run was then. UserError on a full disk."""
        where = {"step": state.step, "tokens": state.tokens, "seconds": round(state.seconds, 3)}
        with written(self._path):
            self._file.write(orjson.dumps(where | dict(fields)) + b"\n")
            self._file.flush()

    def has_tasks(self, step: int) -> bool:
        """Whether it holds what the tasks came to at `step`, to which no session or rollback has gone back since."""
        found = False
        self._file.seek(0)
        for record in records_with(self._file, "tasks", "session", "rollback"):
            if "tasks" in record:
                found = found or record["step"] == step
            else:
                found = found and record.get("session", {}).get("continues", record["step"]) >= step
        return found

    def close(self) -> None:
        """Nothing follows."""
        self._file.close()


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Turns an OSError inside of the block into a sentence about `path`, a log."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"`{path}` must take what the run logs, but cannot ({error.strerror or error}); make room, then start the "
            "run again: its checkpoints are unharmed."
        ) from None


def records_with(lines: Iterable[bytes], *kinds: str) -> Iterator[dict[str, Any]]:
    """Those lines of a log that tell one of `kinds`. One that is no JSON, as a machine that lost its power may leave,
    is passed over."""
    marks = [f'"{kind}":{{'.encode() for kind in kinds]
    for line in lines:
        if any(mark in line for mark in marks):
            try:
                yield orjson.loads(line)
            except orjson.JSONDecodeError:
                continue
