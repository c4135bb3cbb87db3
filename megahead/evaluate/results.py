"""What models reach on tasks, and the JSON file from which an interrupted comparison goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megahead.errors import DataError


@dataclass(frozen=True)
class Score:
    """One metric of one task."""

    metric: str
    value: float
    stderr: float | None
    """Standard error as lm-eval gives it (bootstrapped for perplexity); None where it has none."""


@dataclass(frozen=True)
class TaskResult:
    """What a model reaches on a task."""

    task: str
    samples: int
    scores: list[Score]
    limit: int | None = None
    """How many examples were allowed; None: all."""


@dataclass(frozen=True)
class HarnessResult:
    """What a model reaches on all tasks asked for."""

    model: str
    tasks: list[TaskResult]
    seconds: float

    def record(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


class ResultsFile:
    """One JSON file of results: read when opened, written anew after each task, whole or not at all.

    A result is found again for the same model folder, weights, task, data and limit, under the same lm-eval. `path`
    None keeps results in memory only. Raises DataError for a file that is something else.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._entries: list[dict[str, Any]] = []
        if path is not None and path.exists():
            self._entries = _read(path)

    def find(self, model: Path, folder: Path, task: str, file: Path, limit: int | None) -> TaskResult | None:
        """The result kept of this very evaluation, if there is one."""
        key = _key(model, folder, task, file, limit)
        for entry in self._entries:
            if all(entry.get(name) == value for name, value in key.items()):
                scores = [Score(**score) for score in entry["scores"]]
                return TaskResult(task, entry["samples"], scores, limit)
        return None

    def add(self, model: Path, folder: Path, file: Path, result: TaskResult) -> None:
        """Keeps `result`, in place of what the model reached before on that task with that limit."""
        key = _key(model, folder, result.task, file, result.limit)
        same = ("model", "task", "limit")
        self._entries = [e for e in self._entries if any(e.get(name) != key[name] for name in same)]
        self._entries.append({**key, "samples": result.samples, "scores": [asdict(score) for score in result.scores]})
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial = self._path.with_name(f"{self._path.name}.partial")
            partial.write_text(json.dumps({"results": self._entries}, indent=2) + "\n", encoding="utf-8")
            partial.replace(self._path)


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        entries: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["results"]
    except (OSError, ValueError, KeyError, TypeError):
        raise DataError(f"`{path}` must hold results of this command, but does not; name another --output.") from None
    return entries


def _key(model: Path, folder: Path, task: str, file: Path, limit: int | None) -> dict[str, Any]:
    return {
        "model": str(model),
        "task": task,
        "limit": limit,
        "weights": _stamp(sorted([*folder.glob("*.safetensors"), *folder.glob("*.json")])),
        "data": _stamp([file]),
        "lm_eval": version("lm-eval"),
    }


def _stamp(paths: Sequence[Path]) -> str:
    """Changes with the names, sizes or times of files; contents of many GB are not read."""
    seen = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return hashlib.sha256(repr(seen).encode()).hexdigest()[:16]
