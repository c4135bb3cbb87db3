"""A part of the measurement, and how it ended."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

RESULT, SECONDS = "{result}", "{seconds}"
"""In a part's command: the JSON file it is to write, and how long it may work."""

START_UP = 60.0
"""Seconds of a part with `SECONDS` that are not work: imports, compiling, the last evaluation, saving."""


@dataclass(frozen=True)
class Part:
    """One question, answered by a command of this checkout."""

    name: str

    question: str

    command: tuple[str, ...]
    """A script and its arguments."""

    seconds: float
    """About what it takes on an H100, and at least what is kept for it. Twice that is its limit."""

    packages: tuple[str, ...] = ()
    """Without these it is left out."""

    files: tuple[Path, ...] = ()
    """Likewise."""

    obstacle: str = ""
    """Why it cannot be done, as far as that is known beforehand."""

    explains: str = ""
    """The part whose targets it tells the reason of, where they were missed; it is left out where they were met."""

    @property
    def shares(self) -> bool:
        """Whether it takes as long as it is given: what is kept for it, and an equal share of what nothing needs, of
        all such parts to come."""
        return any(SECONDS in word for word in self.command)

    def lacks(self) -> str:
        """Why it cannot be done here; empty where it can."""
        if self.obstacle:
            return self.obstacle
        packages = [name for name in self.packages if importlib.util.find_spec(name) is None]
        if packages:
            return f"{' and '.join(packages)} must be installed for it, but {'are' if packages[1:] else 'is'} not."
        files = [str(path) for path in self.files if not path.exists()]
        return f"{files[0]} must be there for it, but is not." if files else ""

    def filled(self, result: Path, limit: float) -> list[str]:
        """Its command, to end by itself within `limit` seconds."""
        values = {RESULT: str(result), SECONDS: str(round(max(limit - START_UP, 1)))}
        words = []
        for word in self.command:
            for name, value in values.items():
                word = word.replace(name, value)
            words.append(word)
        return words


@dataclass(frozen=True)
class Outcome:
    """What came of a part."""

    name: str
    question: str
    command: list[str]
    """The part's, by which it is known again."""

    state: Literal["measured", "failed", "too long", "left out"]
    seconds: float = 0.0
    called: list[str] = field(default_factory=list)
    """The command as it was run."""

    why: str = ""
    """In a sentence, unless it was measured."""

    said: str = ""
    """What it printed."""

    lines: list[dict[str, Any]] | None = None
    """What it wrote, also if it failed afterwards."""

    @staticmethod
    def left_out(part: Part, why: str) -> Outcome:
        return Outcome(part.name, part.question, list(part.command), "left out", why=why)

    @staticmethod
    def read(record: Mapping[str, Any]) -> Outcome:
        """The inverse of `vars`."""
        return Outcome(**record)
