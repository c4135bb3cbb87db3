"""Scores of models on tasks, and the file that they are stored in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megahead.evaluate.result_cache import ResultCache, fingerprint_files, fingerprint_model


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


@dataclass(frozen=True)
class HarnessResult:
    """A model's scores on all tasks that were asked for."""

    model: str
    tasks: list[TaskResult]
    seconds: float

    def record(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


class ResultsFile:
    """Results of tasks in one JSON file, as `ResultCache` keeps them.

    A result is found again for the same model folder, weights, task, data and limit, under the same lm-eval.
    """

    def __init__(self, path: Path | None) -> None:
        self._kept = ResultCache(path)

    def find(self, model: Path, folder: Path, task: str, file: Path, limit: int | None) -> TaskResult | None:
        """The stored result of exactly this evaluation, if there is one."""
        entry = self._kept.find(_key(model, folder, task, file, limit))
        return None if entry is None else _result(entry)

    def of(self, model: Path, limit: int | None) -> list[TaskResult]:
        """All stored results of a model's folder with that limit."""
        mine = [entry for entry in self._kept.entries if (entry["model"], entry["limit"]) == (str(model), limit)]
        return [_result(entry) for entry in mine]

    def add(self, model: Path, folder: Path, file: Path, result: TaskResult) -> None:
        """Stores `result`, in place of the model's earlier result on that task with that limit."""
        values = {"samples": result.samples, "scores": [asdict(score) for score in result.scores], "cut": result.cut}
        key = _key(model, folder, result.task, file, result.limit)
        self._kept.add(key, values, replaces=("model", "task", "limit"))


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
