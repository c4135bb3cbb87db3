"""Results of fine-tuning: of each run, as they are stored, and summarised over the seeds of a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from megahead.evaluate.finetuning.loading import TaskData
from megahead.evaluate.finetuning.loop import EpochScores
from megahead.evaluate.finetuning.run import InitialModel
from megahead.evaluate.finetuning.settings import FineTuning
from megahead.evaluate.finetuning.task_table import TASKS
from megahead.evaluate.result_cache import ResultCache, fingerprint_files, fingerprint_model


@dataclass(frozen=True)
class FineTuningResult:
    """One run: a model on a task with a seed."""

    model: str
    task: str
    seed: int
    train_rows: int
    halved: bool
    """Whether half of the dev split was trained on, because there is no training split."""

    epochs: list[EpochScores]

    def best(self) -> int:
        """The epoch (from 0) with the highest score on the first evaluation set; the first of several."""
        metric = TASKS[self.task].metric
        values = [next(iter(epoch.scores.values()))[metric] for epoch in self.epochs]
        return values.index(max(values))

    def scores(self) -> Mapping[str, Mapping[str, float]]:
        """From evaluation set to metric to value, at the best epoch."""
        return self.epochs[self.best()].scores

    def seconds(self) -> float:
        """Training time."""
        return sum(epoch.seconds for epoch in self.epochs)


class FineTuningResults:
    """Results in one JSON file, a `ResultCache`.

    A result is found again for the same model, weights, task, examples, settings and seed.
    """

    def __init__(self, path: Path | None) -> None:
        self._kept = ResultCache(path)

    def newest(self) -> list[FineTuningResult]:
        """The last result stored for each model, task and seed, whatever its settings."""
        runs = {(entry["model"], entry["task"], entry["seed"]): entry for entry in self._kept.entries}
        return [_result(entry, *run) for run, entry in runs.items()]

    def find(
        self, initial_model: InitialModel, data: TaskData, settings: FineTuning, seed: int
    ) -> FineTuningResult | None:
        """The stored result of this run, if there is one."""
        entry = self._kept.find(_key(initial_model, data, settings, seed))
        return None if entry is None else _result(entry, initial_model.name, data.name, seed)

    def add(
        self,
        initial_model: InitialModel,
        data: TaskData,
        settings: FineTuning,
        seed: int,
        epochs: Sequence[EpochScores],
    ) -> FineTuningResult:
        """Stores a finished run, in place of an earlier one with the same settings."""
        result = FineTuningResult(initial_model.name, data.name, seed, len(data.train), data.halved, list(epochs))
        facts = {"train_rows": result.train_rows, "halved": data.halved, "metric": data.task.metric}
        values = {**facts, "best_epoch": result.best() + 1, "epochs": [asdict(epoch) for epoch in epochs]}
        key = _key(initial_model, data, settings, seed)
        self._kept.add(key, values, replaces=("model", "task", "seed", "settings"))
        return result


@dataclass(frozen=True)
class Summary:
    """One metric of a model on one evaluation set (or the mean of several), over seeds."""

    model: str
    task: str
    test: str
    metric: str
    values: list[float]
    """A value for each seed, at its best epoch."""

    epochs: list[int]
    """The best epochs, counted from 1; empty for means of several tasks."""

    def mean(self) -> float:
        """Over seeds."""
        return fmean(self.values)

    def deviation(self) -> float | None:
        """Standard deviation over seeds; None for one."""
        return stdev(self.values) if len(self.values) > 1 else None


def summarise(results: Sequence[FineTuningResult]) -> list[Summary]:
    """Every metric of every evaluation set of one model's tasks, then the means over several."""
    rows = []
    for task in dict.fromkeys(result.task for result in results):
        runs = [result for result in results if result.task == task]
        scores, epochs = [run.scores() for run in runs], [run.best() + 1 for run in runs]
        for test, metrics in scores[0].items():
            rows += [
                Summary(runs[0].model, task, test, metric, [score[test][metric] for score in scores], epochs)
                for metric in metrics
            ]
        if len(scores[0]) > 1:
            metric = TASKS[task].metric
            means = [fmean(found[metric] for found in score.values()) for score in scores]
            rows.append(Summary(runs[0].model, task, f"mean of {len(scores[0])}", metric, means, epochs))
    return [*rows, *(mean for suite in ("glue", "superglue") if (mean := _suite_mean(suite, rows)))]


_LEFT_OUT = ("glue/rte", "glue/wnli")  # of GLUE's mean, as in the paper


def _suite_mean(suite: str, rows: Sequence[Summary]) -> Summary | None:
    """For each seed the mean over a suite's tasks, each measured by the metric that the paper reports; None for one
    task alone, and where some have not run with all seeds yet."""
    members = [
        row
        for row in rows
        if row.task.startswith(f"{suite}/") and row.task not in _LEFT_OUT and row.metric == TASKS[row.task].metric
    ]
    if len(members) < 2 or len({len(row.values) for row in members}) > 1:
        return None
    seeds = zip(*(row.values for row in members), strict=True)
    return Summary(members[0].model, suite, f"mean of {len(members)}", "", [fmean(values) for values in seeds], [])


def _result(entry: Mapping[str, Any], model: str, task: str, seed: int) -> FineTuningResult:
    epochs = [EpochScores(**epoch) for epoch in entry["epochs"]]
    return FineTuningResult(model, task, seed, entry["train_rows"], entry["halved"], epochs)


def _key(initial_model: InitialModel, data: TaskData, settings: FineTuning, seed: int) -> dict[str, Any]:
    return {
        "model": initial_model.name,
        "task": data.name,
        "seed": seed,
        "settings": asdict(settings),
        "weights": _fingerprint(initial_model),
        "data": data.fingerprint,
    }


def _fingerprint(initial_model: InitialModel) -> str:
    """Of all that a result depends on in its folder: of random weights the shape and the tokenizer."""
    folder = initial_model.folder
    if initial_model.random_weights:
        return f"random, {fingerprint_files([folder / 'config.json', folder / 'tokenizer.json'])}"
    return fingerprint_model(folder)
