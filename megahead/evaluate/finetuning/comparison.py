"""Several models on several tasks with several seeds: stored results are reused, missing ones computed and reported."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import chain

from megahead.evaluate.finetuning.loading import TaskData
from megahead.evaluate.finetuning.loop import EpochScores
from megahead.evaluate.finetuning.results import FineTuningResult, FineTuningResults
from megahead.evaluate.finetuning.run import FineTuningRun, InitialModel
from megahead.evaluate.finetuning.settings import FineTuning
from megahead.wording import duration

_TRAINING_COST = 3  # training on a row costs as much as evaluating three
_CHARACTERS_PER_TOKEN = 4  # about; only to estimate the time left


class Comparison:
    """Models x tasks (with their settings) x seeds; each result is stored as soon as its run is finished."""

    def __init__(
        self,
        initial_models: Sequence[InitialModel],
        tasks: Sequence[tuple[TaskData, FineTuning]],
        seeds: Sequence[int],
        kept: FineTuningResults,
    ) -> None:
        self._kept = kept
        self._runs = [
            (initial_model, data, settings, seed)
            for initial_model in initial_models
            for data, settings in tasks
            for seed in seeds
        ]
        self._work = sum(
            settings.epochs * _epoch_cost(data, settings)
            for initial_model, data, settings, seed in self._runs
            if kept.find(initial_model, data, settings, seed) is None
        )
        self._done, self._begin = 0, time.monotonic()

    def run(self, report: Callable[[str], object]) -> list[FineTuningResult]:
        """All results, model by model, then task by task; calls `report` with a line after each epoch."""
        results, task_run = [], None
        for initial_model, data, settings, seed in self._runs:
            result = self._kept.find(initial_model, data, settings, seed)
            if result is None:
                if task_run is None or task_run.initial_model is not initial_model or task_run.data is not data:
                    task_run = FineTuningRun(initial_model, data, settings)
                result = self._kept.add(initial_model, data, settings, seed, self._epochs(task_run, seed, report))
            results.append(result)
        return results

    def _epochs(self, task_run: FineTuningRun, seed: int, report: Callable[[str], object]) -> list[EpochScores]:
        epochs: list[EpochScores] = []
        for epoch in task_run.run(seed):
            epochs.append(epoch)
            self._done += _epoch_cost(task_run.data, task_run.settings)
            report(self._line(task_run, seed, epochs))
        return epochs

    def _line(self, task_run: FineTuningRun, seed: int, epochs: Sequence[EpochScores]) -> str:
        """How far a run is, its speed, and how long all runs will still take."""
        data, last = task_run.data, epochs[-1]
        metric, score = data.task.metric, next(iter(last.scores.values()))[data.task.metric]
        left = (time.monotonic() - self._begin) * (self._work - self._done) / self._done
        return (
            f"{task_run.initial_model.name}: {data.name}, seed {seed}, epoch {len(epochs)}/{task_run.settings.epochs}: "
            f"loss {last.loss:.3f}, {metric} {100 * score:.1f}, {len(data.train) / last.seconds:,.0f} rows/s; "
            f"{self._done / self._work:.0%} of all runs done, {duration(left)} left"
        )


def _epoch_cost(data: TaskData, settings: FineTuning) -> int:
    """An epoch's work, in characters that are read; to estimate the time left."""
    at_most = _CHARACTERS_PER_TOKEN * settings.max_length
    trained = sum(example.characters(at_most) for example in data.train)
    tested = sum(example.characters(at_most) for example in chain.from_iterable(data.evaluation_sets.values()))
    return _TRAINING_COST * trained + tested
