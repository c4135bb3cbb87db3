"""A run's `metrics.jsonl`, to which each of its sessions appends."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from megahead.train.state import TrainingState


class RunLog:
    """Writes an object a line, each of them at once; a last line that a killed session left unfinished is removed."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab+")
        self._file.seek(0)
        self._file.truncate(self._file.read().rfind(b"\n") + 1)

    def record(self, state: TrainingState, fields: Mapping[str, Any]) -> None:
        """What happened (`fields`), and how far the run was then."""
        where = {"step": state.step, "tokens": state.tokens, "seconds": round(state.seconds, 3)}
        self._file.write(orjson.dumps(where | dict(fields)) + b"\n")
        self._file.flush()

    def has_tasks(self, step: int) -> bool:
        """Whether it holds what the tasks came to at `step`, to which no session or rollback has gone back since."""
        found = False
        self._file.seek(0)
        for line in self._file:
            if b'"tasks":{' in line:
                found = found or orjson.loads(line)["step"] == step
            elif b'"session":{' in line or b'"rollback":{' in line:
                record = orjson.loads(line)
                found = found and record.get("session", {}).get("continues", record["step"]) >= step
        return found

    def close(self) -> None:
        """Nothing follows."""
        self._file.close()
