"""Scores of models on tasks, the file that they are stored in, and results that are kept while others are computed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megahead.errors import DataError
from megahead.files import write_atomically
from megahead.wording import pluralize


class ResultCache:
    """Results, each under a key of everything that it depends on: read when opened, written atomically after each one.

    `path` None keeps them in memory only. DataError for a file that holds something else.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._entries: list[dict[str, Any]] = []
        if path is not None and path.exists():
            self._entries = _read(path)

    @property
    def entries(self) -> Sequence[dict[str, Any]]:
        """All results, in the order in which they were added."""
        return self._entries

    def find(self, key: Mapping[str, Any]) -> dict[str, Any] | None:
        """The entry that agrees with `key` in all its values, if there is one."""
        return next((entry for entry in self._entries if _agree(entry, key, key)), None)

    def add(self, key: Mapping[str, Any], values: Mapping[str, Any], *, replaces: Sequence[str]) -> None:
        """Stores `values` under `key`, and removes entries that agree with `key` in the names `replaces`."""
        self._entries = [entry for entry in self._entries if not _agree(entry, key, replaces)]
        self._entries.append({**key, **values})
        if self._path is not None:
            write_atomically(self._path, json.dumps({"results": self._entries}, indent=2) + "\n")


def fingerprint_model(folder: Path) -> str:
    """A fingerprint of a model's weights and settings, see `fingerprint_files`."""
    return fingerprint_files(sorted([*folder.glob("*.safetensors"), *folder.glob("*.json")]))


def fingerprint_files(paths: Sequence[Path]) -> str:
    """A fingerprint of the files' names, sizes and times; contents of many GB are not read."""
    seen = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return hashlib.sha256(repr(seen).encode()).hexdigest()[:16]


def _agree(entry: Mapping[str, Any], key: Mapping[str, Any], names: Sequence[str] | Mapping[str, Any]) -> bool:
    return all(entry.get(name) == key[name] for name in names)


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["results"]
    except (OSError, ValueError, KeyError, TypeError):
        entries = None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise DataError(f"`{path}` must hold results of this command, but does not; name another --output.")
    return entries


# Scores on tasks, and the file that they are stored in.


@dataclass(frozen=True)
class Score:
    """One metric of one task."""

    metric: str
    value: float
    stderr: float | None
    """Standard error, for lm-eval's tasks its own (bootstrapped for perplexity); None if there is none."""


@dataclass(frozen=True)
class TaskResult:
    """A model's scores on a task."""

    task: str
    samples: int
    scores: list[Score]
    limit: int | None = None
    """Largest number of examples that were scored; None: all."""

    cut: int = 0
    """Requests of lm-eval (a text and a continuation) that exceed the context and so lost their beginning."""

    def truncation_note(self) -> str:
        """A line about those requests; empty without any."""
        cut = f"{self.task}: {pluralize(self.cut, 'request')} longer than the context lost the beginning"
        return cut if self.cut else ""


@dataclass(frozen=True)
class HarnessResult:
    """A model's scores on all tasks."""

    model: str
    tasks: list[TaskResult]


class ResultsFile:
    """Results of tasks in one JSON file, as `ResultCache` keeps them.

    A result is found again for the same model folder, weights, task, data and limit, under the same lm-eval.
    """

    def __init__(self, path: Path | None) -> None:
        self._cache = ResultCache(path)

    def find(self, model: Path, folder: Path, task: str, file: Path, limit: int | None) -> TaskResult | None:
        """The stored result of exactly this evaluation, if there is one."""
        entry = self._cache.find(_key(model, folder, task, file, limit))
        return None if entry is None else _result(entry)

    def for_model(self, model: Path, limit: int | None) -> list[TaskResult]:
        """All stored results of a model's folder with that limit."""
        mine = (str(model), limit)
        return [_result(entry) for entry in self._cache.entries if (entry["model"], entry["limit"]) == mine]

    def add(self, model: Path, folder: Path, file: Path, result: TaskResult) -> None:
        """Stores `result`, in place of the model's earlier result on that task with that limit."""
        values = {"samples": result.samples, "scores": [asdict(score) for score in result.scores], "cut": result.cut}
        key = _key(model, folder, result.task, file, result.limit)
        self._cache.add(key, values, replaces=("model", "task", "limit"))


def _result(entry: Mapping[str, Any]) -> TaskResult:
    scores = [Score(**score) for score in entry["scores"]]
    return TaskResult(entry["task"], entry["samples"], scores, entry["limit"], entry.get("cut", 0))


def _key(model: Path, folder: Path, task: str, file: Path, limit: int | None) -> dict[str, Any]:
    return {
        "model": str(model),
        "task": task,
        "limit": limit,
        "weights": fingerprint_model(folder),
        "data": fingerprint_files(sorted(file.iterdir()) if file.is_dir() else [file]),
        "lm_eval": version("lm-eval"),
    }
