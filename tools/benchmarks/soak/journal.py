"""What a soak has done so far, in its folder, so that another sitting goes on from there."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from megahead.errors import FieldError, UserError
from megahead.files import write_atomically


@dataclass
class Sitting:
    """Steps and time in which faults came, from when all nodes trained."""

    began: str
    from_step: int
    to_step: int
    seconds: float


class Journal:
    """In `folder`. Every line of events.jsonl has its time; a fault also its kind, its node and what was done."""

    def __init__(self, folder: Path) -> None:
        self._events, self._sittings = folder / "events.jsonl", folder / "sittings.json"
        self._folder = folder
        listed = json.loads(self._sittings.read_text(encoding="utf-8")) if self._sittings.exists() else []
        self.sittings = [Sitting(**sitting) for sitting in listed]

    @contextmanager
    def held(self, settings: dict[str, Any]) -> Iterator[None]:
        """By this process alone; FieldError where the soak was begun with other settings."""
        with (self._folder / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UserError(
                    f"`--folder` must be used by one soak at a time, but {self._folder} is in use."
                ) from None
            kept = self._folder / "settings.json"
            before = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else settings
            for name, value in settings.items():
                if before[name] != value:
                    raise FieldError(f"--{name}", f"be {before[name]} as this soak began", got=value)
            write_atomically(kept, json.dumps(settings) + "\n")
            yield

    def note(self, **facts: Any) -> None:
        line = json.dumps({"time": datetime.now().isoformat(timespec="milliseconds"), **facts})
        with self._events.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        print(line, flush=True)

    def events(self) -> list[dict[str, Any]]:
        """All lines, but for one that was cut short."""
        if not self._events.exists():
            return []
        lines = self._events.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]

    def next_event(self) -> int:
        """An event that a sitting was stopped in does not come again."""
        return 1 + max((line["event"] for line in self.events() if "event" in line), default=-1)

    def seconds(self) -> float:
        """Of all sittings."""
        return sum(sitting.seconds for sitting in self.sittings)

    def save(self) -> None:
        write_atomically(self._sittings, json.dumps([asdict(sitting) for sitting in self.sittings], indent=1) + "\n")
