"""Several models on several tasks with several seeds: runs already kept are taken, the others made and told of."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import chain

from megahead.evaluate.finetuning.loading import TaskData
from megahead.evaluate.finetuning.loop import EpochScores
from megahead.evaluate.finetuning.results import FineTuningResult, FineTuningResults
from megahead.evaluate.finetuning.run import FineTuningRun, StartModel
from megahead.evaluate.finetuning.settings import FineTuning
from megahead.wording import duration

_TRAINING_COST = 3  # a row that is trained on costs as much as three that are tested
_CHARACTERS_PER_TOKEN = 4  # about; only for the time that is left


class Comparison:
    """Models x tasks (with their settings) x seeds; each run is kept as soon as it is finished."""

    def __init__(
        self,
        starts: Sequence[StartModel],
        tasks: Sequence[tuple[TaskData, FineTuning]],
        seeds: Sequence[int],
        kept: FineTuningResults,
    ) -> None:
        self._kept = kept
        self._runs = [(start, data, settings, seed) for start in starts for data, settings in tasks for seed in seeds]
        self._work = sum(
            settings.epochs * _epoch_cost(data, settings)
            for start, data, settings, seed in self._runs
            if kept.find(start, data, settings, seed) is None
        )
        self._done, self._begin = 0, time.monotonic()

    def run(self, say: Callable[[str], object]) -> list[FineTuningResult]:
        """Every outcome, model by model, then task by task; `say` hears a line after each epoch."""
        outcomes, contest = [], None
        for start, data, settings, seed in self._runs:
            outcome = self._kept.find(start, data, settings, seed)
            if outcome is None:
                if contest is None or contest.start is not start or contest.data is not data:
                    contest = FineTuningRun(start, data, settings)
                outcome = self._kept.add(start, data, settings, seed, self._epochs(contest, seed, say))
            outcomes.append(outcome)
        return outcomes

    def _epochs(self, contest: FineTuningRun, seed: int, say: Callable[[str], object]) -> list[EpochScores]:
        epochs: list[EpochScores] = []
        for epoch in contest.run(seed):
            epochs.append(epoch)
            self._done += _epoch_cost(contest.data, contest.settings)
            say(self._line(contest, seed, epochs))
        return epochs

    def _line(self, contest: FineTuningRun, seed: int, epochs: Sequence[EpochScores]) -> str:
        """Where a run stands, how fast it is, and how long everything will still take."""
        data, last = contest.data, epochs[-1]
        metric, score = data.task.metric, next(iter(last.scores.values()))[data.task.metric]
        left = (time.monotonic() - self._begin) * (self._work - self._done) / self._done
        return (
            f"{contest.start.name}: {data.name}, seed {seed}, epoch {len(epochs)}/{contest.settings.epochs}: "
            f"loss {last.loss:.3f}, {metric} {100 * score:.1f}, {len(data.train) / last.seconds:,.0f} rows/s; "
            f"{self._done / self._work:.0%} of all runs done, {duration(left)} left"
        )


def _epoch_cost(data: TaskData, settings: FineTuning) -> int:
    """An epoch's work in characters read."""
    at_most = _CHARACTERS_PER_TOKEN * settings.max_length
    trained = sum(example.characters(at_most) for example in data.train)
    tested = sum(example.characters(at_most) for example in chain.from_iterable(data.tests.values()))
    return _TRAINING_COST * trained + tested
