"""Compares fine-tuned models: a grid of models, tasks and seeds, its stored results, and their table."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from megahead.evaluate.contrastive_tuning import ContrastiveRun
from megahead.evaluate.finetuning import EpochScores, FineTuningRun, InitialModel
from megahead.evaluate.glue_tasks import TASKS, Example, FineTuningSettings, TaskData
from megahead.evaluate.results import ResultCache, fingerprint_files, fingerprint_model
from megahead.evaluate.search_data import RETRIEVAL_PREFIX, find_task
from megahead.wording import format_duration


@dataclass(frozen=True)
class FineTuningResult:
    """One run: a model on a task with a seed."""

    model: str
    task: str
    seed: int
    train_rows: int
    trains_on_dev: bool
    """Whether half of the dev split was the training set, because the task has no training split."""

    epochs: list[EpochScores]

    def best(self) -> int:
        """Returns the index of the (first) epoch with the highest score on the first evaluation set."""
        return _best_index(self.task, self.epochs)

    def scores(self) -> Mapping[str, Mapping[str, float]]:
        """From evaluation set to metric to value, at the best epoch."""
        return self.epochs[self.best()].scores


def _best_index(task: str, epochs: Sequence[EpochScores]) -> int:
    metric = find_task(task).metric
    values = [next(iter(epoch.scores.values()))[metric] for epoch in epochs]
    return values.index(max(values))


PlannedRun = tuple[InitialModel, TaskData, FineTuningSettings, int]
"""The model, the task, its settings and the seed of a run."""


class FineTuningResults:
    """Results in one JSON file, a `ResultCache`.

    The key is the model, its weights, the task, the examples, the settings and the seed. `is_writer`: true on rank 0
    only.
    """

    def __init__(self, path: Path | None, *, is_writer: bool = True) -> None:
        self._cache = ResultCache(path, "model", "seed", "epochs", is_writer=is_writer)

    def newest(self) -> list[FineTuningResult]:
        """The last result stored for each model, task and seed, whatever its settings."""
        runs = {(entry["model"], entry["task"], entry["seed"]): entry for entry in self._cache.entries}
        return [_from_entry(entry) for entry in runs.values()]

    def find(self, run: PlannedRun) -> FineTuningResult | None:
        """The stored result of this run, if there is one."""
        entry = self._cache.find(_key(*run))
        return None if entry is None else _from_entry(entry)

    def add(self, run: PlannedRun, epochs: Sequence[EpochScores]) -> FineTuningResult:
        """Stores a finished run, in place of an earlier one with the same settings."""
        data, key = run[1], _key(*run)
        fields = {"train_rows": len(data.train), "halved": data.trains_on_dev, "metric": data.task.metric}
        best_epoch = _best_index(data.name, epochs) + 1
        values = {**fields, "best_epoch": best_epoch, "epochs": [asdict(epoch) for epoch in epochs]}
        self._cache.add(key, values, replaces=("model", "task", "seed", "settings"))
        return _from_entry({**key, **values})


@dataclass(frozen=True)
class TaskSummary:
    """One metric of a model on one evaluation set (or the mean of several), over seeds."""

    model: str
    task: str
    evaluation_set: str
    metric: str
    values: list[float]
    """A value for each seed, at its best epoch."""

    epochs: list[int]
    """The best epochs, counted from 1; empty for means of several tasks."""

    def mean(self) -> float:
        """Returns the mean over seeds."""
        return fmean(self.values)

    def full_name(self) -> str:
        """The task, and the evaluation set if its name differs, as in `xnli/fr de`."""
        return self.task if self.evaluation_set == self.task.split("/")[-1] else f"{self.task} {self.evaluation_set}"

    def __str__(self) -> str:
        """In percent, with the standard deviation over seeds and the best epochs: 71.2 ± 0.4 (3 5)."""
        spread = f" ± {100 * stdev(self.values):.1f}" if len(self.values) > 1 else ""
        epochs = f" ({' '.join(map(str, self.epochs))})" if self.epochs else ""
        return f"{100 * self.mean():.1f}{spread}{epochs}"


def summarize(results: Sequence[FineTuningResult]) -> list[TaskSummary]:
    """Returns every metric of every evaluation set of one model's tasks, then the means over tasks."""
    rows = []
    for task in dict.fromkeys(result.task for result in results):
        runs = sorted((result for result in results if result.task == task), key=lambda result: result.seed)
        scores, epochs = [run.scores() for run in runs], [run.best() + 1 for run in runs]
        for name, metric in ((name, metric) for name, metrics in scores[0].items() for metric in metrics):
            values = [score[name][metric] for score in scores]
            rows.append(TaskSummary(runs[0].model, task, name, metric, values, epochs))
        if len(scores[0]) > 1:
            metric = find_task(task).metric
            means = [fmean(metrics[metric] for metrics in score.values()) for score in scores]
            rows.append(TaskSummary(runs[0].model, task, f"mean of {len(scores[0])}", metric, means, epochs))
    return [*rows, *(mean for suite in ("glue", "superglue") if (mean := _suite_mean(suite, rows)))]


_EXCLUDED_TASKS = {"glue/rte", "glue/wnli"}  # excluded from the GLUE average, as in the paper


def _suite_mean(suite: str, rows: Sequence[TaskSummary]) -> TaskSummary | None:
    """Returns for each seed the mean over a suite's tasks, each by the metric that the paper reports; None for a single
    task, or if the tasks have different numbers of seeds."""
    tasks = {task for task in TASKS if task.startswith(f"{suite}/")} - _EXCLUDED_TASKS
    summaries = [row for row in rows if row.task in tasks and row.metric == TASKS[row.task].metric]
    if len(summaries) < 2 or len({len(row.values) for row in summaries}) > 1:
        return None
    seeds = zip(*(row.values for row in summaries), strict=True)
    return TaskSummary(
        summaries[0].model, suite, f"mean of {len(summaries)}", "", [fmean(values) for values in seeds], []
    )


def _from_entry(entry: Mapping[str, Any]) -> FineTuningResult:
    run = {name: entry[name] for name in ("model", "task", "seed", "train_rows")}
    epochs = [EpochScores(**epoch) for epoch in entry["epochs"]]
    return FineTuningResult(**run, trains_on_dev=entry["halved"], epochs=epochs)


def _key(initial_model: InitialModel, data: TaskData, settings: FineTuningSettings, seed: int) -> dict[str, Any]:
    """Everything that a result depends on. With random weights, only the folder's config and tokenizer are compared."""
    folder, weights = initial_model.folder, fingerprint_model(initial_model.folder)
    if initial_model.random_weights:
        files = [path for path in (folder / "config.json", folder / "tokenizer.json") if path.exists()]
        weights = f"random, {fingerprint_files(files)}"
    run = {"model": initial_model.name, "task": data.name, "seed": seed}
    return run | {"settings": asdict(settings), "weights": weights, "data": data.fingerprint}


# A grid of models, tasks and seeds: stored results are reused, missing ones are computed.

TaskRun = FineTuningRun | ContrastiveRun

_TRAINING_COST = 3  # of training on a row, relative to evaluating it
_CHARACTERS_PER_TOKEN = 4  # about; only to estimate the time left


class Comparison:
    """Models x tasks (with their settings) x seeds; each result is stored as soon as its run is finished."""

    def __init__(
        self,
        initial_models: Sequence[InitialModel],
        tasks: Sequence[tuple[TaskData, FineTuningSettings]],
        seeds: Sequence[int],
        cache: FineTuningResults,
        save_folder: Path | None = None,
    ) -> None:
        """`save_folder`: where the run of a retrieval task (`ContrastiveRun`) writes its best model."""
        self._cache, self._save_folder = cache, save_folder
        self._runs = [(model, *task, seed) for model, task, seed in product(initial_models, tasks, seeds)]
        missing = [run for run in self._runs if self._find(run) is None]
        self._work = sum(settings.epochs * _epoch_cost(data, settings) for _, data, settings, _ in missing)
        self._done, self._start_time = 0, time.monotonic()

    def run(self, report: Callable[[str], object]) -> list[FineTuningResult]:
        """Returns all results, ordered by model, then task; calls `report` with a line after each epoch."""
        results, task_run = list[FineTuningResult](), None
        for run in self._runs:
            result = self._find(run)
            if result is None:
                initial_model, data, settings, seed = run
                if task_run is None or task_run.initial_model is not initial_model or task_run.data is not data:
                    run_class = ContrastiveRun if data.name.startswith(RETRIEVAL_PREFIX) else FineTuningRun
                    task_run = run_class(initial_model, data, settings)
                    if task_run.truncation_note:
                        report(task_run.truncation_note)
                result = self._cache.add(run, self._epochs(task_run, seed, report))
            results.append(result)
        return results

    def _find(self, run: PlannedRun) -> FineTuningResult | None:
        """The stored result; None if models are to be saved, since results do not contain models."""
        return None if self._save_folder else self._cache.find(run)

    def _epochs(self, task_run: TaskRun, seed: int, report: Callable[[str], object]) -> list[EpochScores]:
        epochs: list[EpochScores] = []
        data, settings = task_run.data, task_run.settings
        for epoch in task_run.run(seed):
            epochs.append(epoch)
            is_best = _best_index(data.name, epochs) == len(epochs) - 1
            if is_best and self._save_folder and isinstance(task_run, ContrastiveRun):
                task_run.save(self._save_folder)
            self._done += _epoch_cost(data, settings)
            score, rate = next(iter(epoch.scores.values()))[data.task.metric], len(data.train) / epoch.seconds
            left = (time.monotonic() - self._start_time) * (self._work - self._done) / self._done
            report(
                f"{task_run.initial_model.name}: {data.name}, seed {seed}, epoch {len(epochs)}/{settings.epochs}: "
                f"loss {epoch.loss:.3f}, {data.task.metric} {100 * score:.1f}, {rate:,.0f} rows/s; "
                f"{self._done / self._work:.0%} of all runs done, {format_duration(left)} left"
            )
        return epochs


def _epoch_cost(data: TaskData, settings: FineTuningSettings) -> int:
    """Returns the relative cost of an epoch, in characters; to estimate the time left."""

    def num_characters(examples: Iterable[Example]) -> int:
        return sum(example.num_characters(_CHARACTERS_PER_TOKEN * settings.max_length) for example in examples)

    evaluated = chain.from_iterable(data.evaluation_sets.values())
    return _TRAINING_COST * num_characters(data.train) + num_characters(evaluated)


# The comparison table: scores in percent, and training time.


def comparison_table(results: Sequence[FineTuningResult]) -> list[dict[str, object]]:
    """Returns a row for each metric of a task, a column for each model, and a last row of training time."""
    rows: dict[tuple[str, str, str], dict[str, object]] = {}
    times: dict[str, object] = {"task": "training"}
    for model in dict.fromkeys(result.model for result in results):
        model_results = [result for result in results if result.model == model]
        tasks_on_dev = {result.task for result in model_results if result.trains_on_dev}
        for summary in summarize(model_results):
            task = summary.task + (" (half of dev)" if summary.task in tasks_on_dev else "")
            test = "" if summary.evaluation_set == summary.task.split("/")[-1] else summary.evaluation_set
            names: dict[str, object] = {"task": task, "test": test, "metric": summary.metric}
            rows.setdefault((task, test, summary.metric), names)[model] = str(summary)
        times[model] = format_duration(sum(epoch.seconds for result in model_results for epoch in result.epochs))
    return [*rows.values(), times]
