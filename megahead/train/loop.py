"""The training loop: steps until the end or until someone asks to stop, evaluated and saved on the way."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from megahead.config import RunConfig
from megahead.distributed import Group
from megahead.engine import Engine
from megahead.optim import learning_rate_ratio
from megahead.pretraining import Feed, StepBatches
from megahead.train.evaluation import Evaluation
from megahead.train.faults import SkipLimit, StopRequest
from megahead.train.meters import Meters
from megahead.train.state import TrainingState
from megahead.train.step import seed_step, train_step
from megahead.train.stopwatch import Stopwatch
from megahead.train.tasks import TaskEvaluation

Ending = Literal["finished", "out of time", "stopped"]


@dataclass(frozen=True)
class Training:
    """The parts of a run that are ready to train; `setup` puts them together."""

    config: RunConfig
    engine: Engine
    feed: Feed
    state: TrainingState
    meters: Meters
    stop: StopRequest
    evaluation: Evaluation | None
    tasks: TaskEvaluation | None
    save: Callable[[], Path]
    device: torch.device

    data: Group
    """Data-parallel ranks, for CPU tensors."""

    world: Group
    """All ranks, for CPU tensors."""


def train(run: Training) -> Ending:
    """Trains from wherever `run.state` stands to the last step, a signal, or the time limit. Collective.

    Evaluates and saves at the configured steps and at the end, whatever ended it; after a signal it only saves,
    because who stops us has little patience.
    """
    state, plan = run.state, run.config.training
    skips, watch = SkipLimit(), Stopwatch(state.seconds)
    ending: Ending = "finished"
    run.meters.start(state)
    with closing(run.feed.steps(state.samples)) as steps:
        while state.step < plan.steps and ending == "finished":
            applied = _advance(run, next(steps), watch, skips)
            ending = _agreed_ending(run)
            with watch.paused():
                _look_and_save(run, applied, ending)
    return ending


def _advance(run: Training, batches: StepBatches, watch: Stopwatch, skips: SkipLimit) -> bool:
    """One step, and its traces in the state and the meters; whether it was applied."""
    config, state = run.config, run.state
    ratio = learning_rate_ratio(config.schedule, state.step, config.training.steps)
    seed_step(config.seed, state.samples, run.data.rank)
    report = train_step(run.engine, batches, config.optimizer.learning_rate * ratio, run.device, run.data)
    state.samples += config.batch.global_size
    state.tokens += config.tokens_per_step()
    state.seconds = watch.seconds()
    if report.applied:
        state.step += 1
        state.targets += report.targets
        for micro in batches.micro_batches:
            state.count(micro.batch)
    else:
        state.skipped_steps += 1
    run.meters.step(report, state)
    skips.note(report.applied, state.step)
    return report.applied


def _look_and_save(run: Training, applied: bool, ending: Ending) -> None:
    """Evaluates and saves what is due after this step."""
    state, plan, tasks = run.state, run.config.training, run.tasks
    last = state.step >= plan.steps or ending != "finished"

    def due(every: int) -> bool:
        return last or (applied and state.step % every == 0)

    if ending != "stopped" and due(plan.evaluate_every):
        _evaluate(run)
    evaluated = tasks is not None and ending != "stopped" and due(tasks.every)
    if evaluated or due(plan.checkpoint_every):
        checkpoint = run.save()
        if tasks is not None and evaluated:
            run.meters.tasks(tasks.run(checkpoint), state)


def _evaluate(run: Training) -> None:
    if run.evaluation is not None:
        result = run.evaluation.run(run.engine, run.state)
        run.meters.held_out(result, run.state, run.evaluation.head)


def _agreed_ending(run: Training) -> Ending:
    """Why to stop after this step, the same on every rank: a signal to any rank, or rank 0's clock."""
    limit = run.config.training.max_seconds
    late = run.world.rank == 0 and limit is not None and run.state.seconds >= limit
    votes = run.world.sum_(torch.tensor([run.stop.signal is not None, late], dtype=torch.int32)).tolist()
    if votes[0]:
        return "stopped"
    return "out of time" if votes[1] else "finished"
