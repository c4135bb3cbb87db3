"""How far a run is, read from its log while it is written."""

from __future__ import annotations

import json
import statistics
from collections import deque
from pathlib import Path

USUAL = 100
"""Steps by which it is told how long one takes."""


class Progress:
    """Of the run with that log, as of the last `read`."""

    def __init__(self, metrics: Path) -> None:
        self._metrics, self._place = metrics, 0
        self.step = self.sessions = self.ranks = self.steps_since_session = 0
        self.odd_replicas = 0
        """That were found, and after which another session has begun."""
        self.lines = 0
        """Steps that were logged, those done again included."""
        self._odd = False
        self._seconds: deque[float] = deque(maxlen=USUAL)
        self.read()

    def read(self) -> None:
        if not self._metrics.exists():
            return
        with self._metrics.open("rb") as file:
            file.seek(self._place)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._place += len(line)
                self._note(json.loads(line))

    def usual_seconds(self) -> float:
        """Of a step."""
        return statistics.median(self._seconds) if self._seconds else 0.0

    def _note(self, record: dict[str, object]) -> None:
        if isinstance(session := record.get("session"), dict):
            self.sessions, self.steps_since_session = self.sessions + 1, 0
            self.step, self.ranks = int(session["continues"]), int(session["mesh"]["data"])
            self.odd_replicas, self._odd = self.odd_replicas + self._odd, False
        self._odd |= "replica" in record
        if "loss" in record:
            self.step, self.lines = int(str(record["step"])), self.lines + 1
            self.steps_since_session += 1
            self._seconds.append(float(str(record["step_seconds"])))
