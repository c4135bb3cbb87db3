"""The training loop: steps until the end or a request to stop, with evaluations and checkpoints in between."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megahead.config import RunConfig
from megahead.distributed import Group
from megahead.engine import Engine
from megahead.errors import UserError
from megahead.mirror import Mirror
from megahead.optim import learning_rate_ratio
from megahead.pretraining import Feed, StepBatches
from megahead.train.copier import Copier
from megahead.train.detection_tally import DetectionTally
from megahead.train.evaluation import Evaluation
from megahead.train.faults import Guard
from megahead.train.health import Health
from megahead.train.meters import Meters
from megahead.train.preemption import Ending, StopRequest
from megahead.train.saver import Saver
from megahead.train.state import TrainingState
from megahead.train.step import StepReport, seed_step, train_step
from megahead.train.stopwatch import Stopwatch
from megahead.train.task_evaluation import TaskEvaluation


@dataclass(frozen=True)
class Training:
    """The parts of a run that are ready to train; `setup` puts them together."""

    config: RunConfig
    """That of the phase."""

    until: int
    """Steps of the run at which the phase ends."""

    evaluate_first: bool
    """Whether it begins with weights that learned something else, another phase's or those of `init`, so that an
    evaluation shows what these are worth to it."""

    engine: Engine
    feed: Feed
    state: TrainingState
    guard: Guard
    health: Health
    meters: Meters
    stop: StopRequest
    evaluation: Evaluation | None
    tasks: TaskEvaluation | None
    tally: DetectionTally | None
    saver: Saver
    copier: Copier
    mirror: Mirror | None
    """Rank 0's."""

    roll_back: Callable[[], Path | None]
    device: torch.device

    data_group: Group
    """Data-parallel ranks, for CPU tensors."""

    world_group: Group
    """All ranks, for CPU tensors."""


def train(run: Training) -> Ending:
    """Trains from `run.state` to the last step of its phase, a signal, or the time limit. Collective.

    Evaluates and saves at the configured steps and at the end. After a signal it only saves: its sender (a scheduler,
    say) will soon kill the process.
    """
    state = run.state
    _evaluate(run) if run.evaluate_first else _run_missed_evaluation(run)
    began_at, watch = state.step, Stopwatch(state.seconds)
    ending: Ending | None = None
    run.meters.start(state)
    with closing(run.feed.steps(state.samples)) as steps:
        while state.step < run.until and ending is None:
            applied = _advance(run, next(steps), watch)
            with watch.paused():
                if applied and _replicas_agree(run):
                    _evaluate_and_save_if_due(run)
            run.meters.mirrored([] if run.mirror is None else run.mirror.news(), run.state)
            ending = _reason_to_stop(run)
    if ending != "stopped" and not state.evaluated:
        _evaluate(run)
    if not run.saver.up_to_date:
        _save(run)
    run.saver.wait()
    if run.tasks and ending != "stopped" and state.step > began_at and state.step % run.tasks.every:
        _evaluate_tasks(run, run.tasks)
    return ending or "finished"


def _advance(run: Training, batches: StepBatches, watch: Stopwatch) -> bool:
    """Takes one step and records it in the state and the meters; returns whether it was applied."""
    config, state, first_sample = run.config, run.state, run.state.samples
    ratio = learning_rate_ratio(config.schedule, state.step, config.training.steps)
    seed_step(config.seed, first_sample, run.data_group.rank, run.device)
    learning_rate = config.optimizer.learning_rate * ratio
    report = train_step(run.engine, batches, learning_rate, run.device, run.world_group, run.guard, state.recent_losses)
    if run.tally is not None:
        report = replace(report, detection=run.tally.take(run.data_group))
    state.samples += config.batch.global_size
    state.tokens += config.tokens_per_step()
    state.seconds = watch.seconds()
    if report.applied:
        state.record_applied_step(config.batch.global_size, report.targets)
        for micro in batches.micro_batches:
            state.count_targets(micro.batch)
        run.guard.remember(report.loss, state.recent_losses)
    if state.difficulty is not None:
        state.difficulty.settle(state.samples, report.applied, run.data_group)
    state.skipped_steps += not report.applied
    run.meters.step(report, state, last=state.step >= run.until)
    _handle_fault(run, report, first_sample)
    slow = run.health.pace.after_step(report.forward_seconds)
    if slow is not None:
        run.meters.slow(slow, state)
    return report.applied


def _handle_fault(run: Training, report: StepReport, first_sample: int) -> None:
    """Does what the config asks for after a bad step, and prints that."""
    action = run.guard.decide(report.fault)
    if report.fault is None:
        return
    state, tensor_size = run.state, run.world_group.size // run.data_group.size
    bad = [(rank, run.feed.samples(first_sample, k, rank // tensor_size)) for rank, k in report.fault.places]
    rows = range(first_sample, first_sample + run.config.batch.global_size)
    state.spikes += report.fault.kind == "spike"
    sentence = run.meters.fault(report, bad or [(None, rows)], action, state)
    if action == "stop":
        raise UserError(
            f"steps must be finite and without spikes, but {sentence}, {run.guard.in_a_row} bad in a row; lower "
            "optimizer.learning_rate or the clipping threshold, use fp32 or bf16, or change `faults`, and resume."
        )
    if action == "rollback":
        _roll_back(run)


def _roll_back(run: Training) -> bool:
    """Whether there was a checkpoint to go back to."""
    run.saver.wait()
    run.copier.forget()
    reached, folder = run.state.step, run.roll_back()
    run.state.rollbacks += folder is not None
    run.meters.rolled_back(folder, reached - run.state.step, run.state)
    return folder is not None


def _replicas_agree(run: Training) -> bool:
    """Compares replicas if that is due; where they differ, does what the config asks for. Collective."""
    step, policy = run.state.step, run.config.faults.replicas
    keeps = step >= run.until or _save_is_due(run) or run.copier.due(step)
    odd = run.health.odd_replica() if run.health.due(step, keeps) else None
    if odd is None:
        return True
    sentence = run.meters.odd_replica(odd, run.health.hosts, policy, run.state)
    if policy == "stop" or (policy == "rollback" and not (run.guard.may_roll_back() and _roll_back(run))):
        raise UserError(
            f"replicas of weights must hold the same bits, but at {sentence}; it is not saved: resume, and test the "
            "memory of that machine."
        )
    return policy == "note"


def _save_is_due(run: Training) -> bool:
    step, tasks = run.state.step, run.tasks
    return (tasks is not None and step % tasks.every == 0) or step % run.config.training.checkpoint_every == 0


def _evaluate_and_save_if_due(run: Training) -> None:
    """Evaluates and saves what is due after an applied step."""
    step, training, tasks = run.state.step, run.config.training, run.tasks
    if step % training.evaluate_every == 0:
        _evaluate(run)
    if _save_is_due(run):
        _save(run)
    elif run.copier.due(step):
        run.meters.copied(run.copier.renew(), run.state)
    if tasks and step % tasks.every == 0:
        _evaluate_tasks(run, tasks)


def _run_missed_evaluation(run: Training) -> None:
    """Runs the evaluation that was due at the resumed step, if a signal prevented it; a checkpoint that was due at that
    step is written again, with the result."""
    state, training = run.state, run.config.training
    if not state.step or state.evaluated or state.step % training.evaluate_every:
        return
    _evaluate(run)
    if state.evaluated and state.step % training.checkpoint_every == 0:
        _save(run)


def _evaluate(run: Training) -> None:
    """Evaluates, unless a signal interrupts it; `_reason_to_stop` then sees that signal too."""
    if run.evaluation is not None:
        result = run.evaluation.run(run.engine, run.state, lambda: run.stop.agreed(run.world_group))
        if result is not None:
            run.state.validation = {"step": run.state.step, "loss": result.loss}
            run.meters.validation(result, run.state, run.evaluation.head)


def _evaluate_tasks(run: Training, tasks: TaskEvaluation) -> None:
    """Evaluates the tasks with the checkpoint that was saved last."""
    checkpoint = run.saver.wait()
    if checkpoint is not None:
        run.meters.tasks(tasks.run(checkpoint), run.state)


def _save(run: Training) -> None:
    run.meters.saved(run.saver.save(), run.state)
    run.guard.saved()


def _reason_to_stop(run: Training) -> Ending | None:
    """Why to stop now, the same on every rank: a signal to any rank, or rank 0's clock; None: keep training.

    If a background save has failed on any rank, raises its error. Collective.
    """
    limit = run.config.training.max_seconds
    overtime = run.world_group.rank == 0 and limit is not None and run.state.seconds >= limit
    votes = torch.tensor([run.stop.signal is not None, overtime, run.saver.failed], dtype=torch.int32)
    stopped, overtime, failed = run.world_group.all_reduce_(votes).tolist()
    if failed:
        run.saver.wait()
    if stopped:
        return "stopped"
    return "out of time" if overtime else None
