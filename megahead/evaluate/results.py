"""Scores of models on tasks, and JSON files that cache results between calls."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from megahead.errors import DataError
from megahead.files import write_atomically
from megahead.wording import pluralize


class ResultCache:
    """Results in a JSON file, each with a key of everything that it depends on; written atomically after each one.

    New results stay in memory if `path` is None, or `is_writer` is false (another rank writes the file). DataError
    unless each entry of the file has all `fields`.
    """

    def __init__(self, path: Path | None, *fields: str, is_writer: bool = True) -> None:
        self._path, self._fields = path if is_writer else None, fields
        self.entries = _read_entries(path, fields) if path is not None and path.exists() else []
        """All results, in the order in which they were added."""

    def find(self, key: Mapping[str, Any]) -> dict[str, Any] | None:
        """Returns the entry that has all values of `key`, or None."""
        return next((entry for entry in self.entries if _matches(entry, key, key)), None)

    def add(self, key: Mapping[str, Any], values: Mapping[str, Any], *, replaces: Sequence[str]) -> None:
        """Stores `values` under `key`, and removes entries with the same values of the keys in `replaces`. Keeps what
        another command has written to the file meanwhile."""
        if self._path is not None and self._path.exists():
            self.entries = _read_entries(self._path, self._fields)
        self.entries = [entry for entry in self.entries if not _matches(entry, key, replaces)]
        self.entries.append({**key, **values})
        if self._path is not None:
            write_atomically(self._path, json.dumps({"results": self.entries}, indent=2) + "\n")


_START = b'{\n  "results": ['
"""How the file of a `ResultCache` begins."""


def fingerprint_model(folder: Path) -> str:
    """Returns a fingerprint of a model's weights and settings, see `fingerprint_files`. Results that are stored beside
    them do not count."""
    files = sorted(path for pattern in ("*.safetensors", "*.bin", "*.json") for path in folder.glob(pattern))
    return fingerprint_files([path for path in files if not _begins(path, _START)])


def _begins(path: Path, start: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(start)) == start


def fingerprint_files(paths: Sequence[Path]) -> str:
    """Returns a fingerprint of the files' names, sizes and times; contents of many GB are not read."""
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return hashlib.sha256(repr(stats).encode()).hexdigest()[:16]


def _matches(entry: Mapping[str, Any], key: Mapping[str, Any], names: Sequence[str] | Mapping[str, Any]) -> bool:
    return all(entry.get(name) == key[name] for name in names)


def _read_entries(path: Path, fields: Sequence[str]) -> list[dict[str, Any]]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["results"]
    except (OSError, ValueError, KeyError, TypeError):
        entries = None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) and {*fields} <= {*entry} for entry in entries):
        raise DataError(f"`{path}` must hold results of this command, but does not; name another --output.")
    return entries


# Scores on tasks, and the file that caches them.


@dataclass(frozen=True)
class Score:
    """One metric of one task."""

    metric: str
    value: float
    stderr: float | None
    """Standard error; for lm-eval's tasks lm-eval's own (bootstrapped for perplexity). None if there is none."""

    @staticmethod
    def mean(metric: str, values_N: ArrayLike) -> Score:
        """The mean of the examples' values, with its standard error if there are several."""
        values_N = np.asarray(values_N, np.float64)
        count = len(values_N)
        return Score(metric, float(values_N.mean()), float(values_N.std(ddof=1)) / sqrt(count) if count > 1 else None)


@dataclass(frozen=True)
class TaskResult:
    """A model's scores on a task."""

    task: str
    samples: int
    scores: list[Score]
    limit: int | None = None
    """Largest number of examples that were scored; None: all."""

    num_truncated: int = 0
    """Inputs that exceed the limit: requests of lm-eval (a text and a continuation) longer than the context, truncated
    on the left; texts for an encoder, truncated on the right."""

    def truncation_note(self) -> str:
        """Returns a line about truncated inputs; empty without any."""
        note = f"{self.task}: {pluralize(self.num_truncated, 'input')} longer than the limit, and truncated"
        return note if self.num_truncated else ""


class ResultsFile:
    """Results of tasks in one JSON file, a `ResultCache`.

    `model` is the path that was named (a run, a checkpoint or a Hugging Face folder), `folder` the Hugging Face folder
    that is scored for it. The key is `model`, the fingerprint of `folder`, the task, its data, the limit and the
    version of lm-eval.
    """

    def __init__(self, path: Path | None) -> None:
        self._cache = ResultCache(path, "model", "limit", "scores")

    def find(self, model: Path, folder: Path, task: str, file: Path, limit: int | None) -> TaskResult | None:
        """Returns the stored result of this evaluation, or None."""
        entry = self._cache.find(_key(model, folder, task, file, limit))
        return None if entry is None else _from_entry(entry)

    def for_model(self, model: Path, limit: int | None) -> list[TaskResult]:
        """Returns all stored results of a model's folder with that limit."""
        key = (str(model), limit)
        return [_from_entry(entry) for entry in self._cache.entries if (entry["model"], entry["limit"]) == key]

    def add(self, model: Path, folder: Path, file: Path, result: TaskResult) -> None:
        """Stores `result`, in place of the model's earlier result on that task with that limit."""
        scores = [asdict(score) for score in result.scores]
        values = {"samples": result.samples, "scores": scores, "cut": result.num_truncated}
        key = _key(model, folder, result.task, file, result.limit)
        self._cache.add(key, values, replaces=("model", "task", "limit"))


def _from_entry(entry: Mapping[str, Any]) -> TaskResult:
    scores = [Score(**score) for score in entry["scores"]]
    return TaskResult(entry["task"], entry["samples"], scores, entry["limit"], entry.get("cut", 0))


def _key(model: Path, folder: Path, task: str, file: Path, limit: int | None) -> dict[str, Any]:
    return {
        "model": str(model),
        "task": task,
        "limit": limit,
        "weights": fingerprint_model(folder),
        "data": fingerprint_files(sorted(filter(Path.is_file, file.rglob("*"))) if file.is_dir() else [file]),
        "lm_eval": version("lm-eval"),
    }
