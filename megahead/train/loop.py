"""The training loop: steps until the end or a request to stop, with evaluations, checkpoints and recovery."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import cast

import torch

from megahead.checkpoints.format import run_on_first_rank
from megahead.config.run import RunConfig
from megahead.config.training import TasksConfig
from megahead.data.samples import Samples
from megahead.distributed.group import Group
from megahead.engine.engine import Engine
from megahead.errors import UserError
from megahead.evaluate.perplexity import ValidationResult, ValidationSet
from megahead.evaluate.results import TaskResult
from megahead.losses.candidates import evaluation_target_counts, training_free_bias
from megahead.losses.softmax import EvaluationSums
from megahead.objectives.loader import StepBatches, StepLoader
from megahead.objectives.micro_batch import EvaluationRequest
from megahead.optim import learning_rate_ratio
from megahead.run_folder import RunFolder
from megahead.train.faults import Ending, FaultPolicy, HealthMonitor, StopRequest
from megahead.train.log import RunLogger
from megahead.train.preflight import find_task_files
from megahead.train.progress import Progress, TrainingState
from megahead.train.saving import Checkpointer
from megahead.train.step import StepMetrics, StepReport, Stopwatch, seed_step, train_step


class Evaluation:
    """Evaluates the validation dataset; in a headless run with the training-free head. For the paper's objective the
    head's bias is log q, where q is the distribution of the targets so far, smoothed with the dataset's counts. If
    training masks rare tokens more often than evaluation does, q is the dataset's distribution instead."""

    def __init__(self, config: RunConfig, samples: Samples, data_group: Group, device: torch.device) -> None:
        self.head, self._config, self._data_group, self._device = config.objective.head(), config, data_group, device
        self._validation_set = ValidationSet.from_config(config, samples, data_group)
        self.data = f"{config.training.evaluate_samples} samples of {samples.dataset.fingerprint}"
        """A fingerprint of the samples."""

    def run(self, engine: Engine, state: TrainingState, should_stop: Callable[[], bool]) -> ValidationResult | None:
        """The result; None once `should_stop()`, which is called every few batches, is true. Collective."""
        bias_V = None
        if self.head == "pmi":
            counts_V = state.target_counts(self._data_group)
            evaluation_counts_V = evaluation_target_counts(self._config, state.dataset_counts)
            objective, vocab_size = self._config.objective, self._config.model.vocab_size
            targets = state.mean_group_targets(self._config.targets_per_row())
            counts = counts_V, state.dataset_counts, targets, evaluation_counts_V
            bias_V = training_free_bias(objective, vocab_size, *counts)

        def score(request: EvaluationRequest) -> EvaluationSums:
            if should_stop():
                raise _InterruptedError
            return cast(EvaluationSums, engine.evaluate(request))

        try:
            return self._validation_set.evaluate(score, bias_V, self._device)
        except _InterruptedError:
            return None


class _InterruptedError(Exception):
    """Ends an evaluation early."""


class TaskEvaluation:
    """Evaluates the downstream tasks of a run (settings `tasks`). Creating it checks their files, so that a mistake is
    an error before training."""

    def __init__(self, config: TasksConfig, world_group: Group, *, is_encoder: bool) -> None:
        self.interval, self._limit, self._world_group = config.every, config.limit, world_group
        self._files = find_task_files(config, is_encoder)

    def run(self, checkpoint: Path) -> list[TaskResult]:
        """Results of all tasks in their order, for the model in `checkpoint` with the best head it has. Collective.
        Rank 0 exports the model, rank r of W evaluates tasks r, r + W, ... in fp32, and rank 0 removes the export. Does
        not restore torch's random state, since every step sets its seed. CheckpointError if the export fails."""
        from megahead.evaluate.harness import evaluate_tasks  # imports transformers: seconds

        folder = RunFolder.of(checkpoint).exports / "evaluated"
        run_on_first_rank(self._world_group, lambda: _export(checkpoint, folder))
        rank_files = dict(list(self._files.items())[self._world_group.rank :: self._world_group.size])
        rank_results = list(evaluate_tasks(folder, rank_files, limit=self._limit)) if rank_files else []
        results = chain.from_iterable(self._world_group.all_gather_objects(rank_results))
        if self._world_group.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)  # NFS keeps files that are still mapped
        result_by_task = {result.task: result for result in results}
        return [result_by_task[name] for name in self._files]


def _export(checkpoint: Path, folder: Path) -> None:
    from megahead.hf.export import export
    from megahead.hf.heads import best_head
    from megahead.hf.trained import TrainedModel

    export(checkpoint, folder, best_head(TrainedModel.open(checkpoint)))


@dataclass(frozen=True)
class Training:
    """The components of the training loop for one phase of a run, which run.py builds."""

    progress: Progress
    """What a checkpoint holds, in this phase: engine (weights, optimizer) and counters; with the groups of ranks."""

    loader: StepLoader
    step_metrics: StepMetrics
    fault_policy: FaultPolicy
    health: HealthMonitor
    logger: RunLogger
    stop: StopRequest
    evaluation: Evaluation | None
    tasks: TaskEvaluation | None
    checkpointer: Checkpointer
    device: torch.device

    evaluate_first: bool
    """Whether to evaluate before the first step: the weights are those of another phase or of `init`."""

    @property
    def config(self) -> RunConfig:
        """The phase's config."""
        return self.progress.phase.config

    @property
    def end_step(self) -> int:
        """The run's step at which the phase ends."""
        return self.progress.phase.steps.stop

    @property
    def state(self) -> TrainingState:
        """The counters of the run."""
        return self.progress.state


# Actions after a bad step (not finite, or a loss spike), or if data ranks' weights differ: a message, a rollback, or
# the end of the run.


def handle_fault(run: Training, report: StepReport, first_sample: int) -> None:
    """Logs a bad step and takes the action that the config sets for it."""
    action = run.fault_policy.decide(report.fault)
    if report.fault is None:
        return
    state, tensor_size = run.state, run.progress.world_group.size // run.progress.data_group.size
    bad = [(rank, run.loader.samples(first_sample, k, rank // tensor_size)) for rank, k in report.fault.micro_batches]
    global_batch = range(first_sample, first_sample + run.config.batch.global_size)
    state.spikes += report.fault.kind == "spike"
    message = run.logger.log_fault(report, bad or [(None, global_batch)], action, state)
    if action == "stop":
        raise UserError(
            f"steps must be finite and without spikes, but {message}, {run.fault_policy.limit_reached()}; lower "
            "optimizer.learning_rate or the clipping threshold, use fp32 or bf16, or change `faults`, and resume."
        )
    if action == "rollback" and not _roll_back(run):
        run.fault_policy.reset_rollbacks()  # none has happened


def _roll_back(run: Training) -> bool:
    """Goes back to the newest checkpoint; returns whether there was one."""
    run.checkpointer.before_rollback()
    last_step, folder = run.state.step, run.progress.roll_back()
    run.state.rollbacks += folder is not None
    run.logger.log_rollback(folder, last_step - run.state.step, run.state)
    return folder is not None


def check_weight_replicas(run: Training, *, will_save: bool) -> bool:
    """Compares the data ranks' weights if that is due, and takes the config's action if they differ. Returns
    whether training continues with the present weights. Collective."""
    policy, mismatch = run.config.faults.replicas, run.health.weight_mismatch(run.state.step, will_save=will_save)
    if mismatch is None:
        return True
    message = mismatch.message(run.state.step, run.health.hosts)
    run.logger.log_event("replica", asdict(mismatch) | {"action": policy}, run.state, message)
    if policy == "stop" or (policy == "rollback" and not (run.fault_policy.may_roll_back() and _roll_back(run))):
        raise UserError(
            f"replicas of weights must hold the same bits, but at {message}; it is not saved: resume, and test the "
            "memory of that machine."
        )
    return policy == "note"


def train(run: Training) -> Ending:
    """Trains from `run.state` to the last step of its phase, a signal, or the time limit. Collective. Evaluates and
    saves at the configured steps and at the end. After a signal it only saves, since the sender (for example a
    scheduler) will soon kill the process."""
    state = run.state
    _evaluate(run) if run.evaluate_first else _run_missed_evaluation(run)
    ending = _reason_to_stop(run)
    if ending != "stopped":
        _run_missed_tasks(run)
    first_step, stopwatch = state.step, Stopwatch(state.seconds)
    run.logger.start_interval(state)
    with closing(run.loader.steps(state.samples)) as steps:
        while state.step < run.end_step and ending is None:
            applied = _advance(run, next(steps), stopwatch)
            with stopwatch.paused():
                if applied and check_weight_replicas(run, will_save=_will_save(run)):
                    _evaluate_and_save_if_due(run)
            for event in run.checkpointer.events():
                run.logger.log_event(event.record, event.fields, state, event.message)
            ending = _reason_to_stop(run)
    run.logger.flush(state)
    was_evaluated = state.evaluated
    if ending != "stopped" and not state.evaluated and not _evaluate(run):
        ending = "stopped"
    # a new evaluation must be saved too, for `keep_best`
    is_saved = run.checkpointer.up_to_date and state.evaluated == was_evaluated
    if state.samples and not is_saved and (ending is None or check_weight_replicas(run, will_save=True)):
        _save(run)
    run.checkpointer.wait()
    if run.tasks and ending != "stopped" and state.step > first_step and state.step % run.tasks.interval:
        _evaluate_tasks(run, run.tasks)
    return ending or "finished"


def _advance(run: Training, batches: StepBatches, stopwatch: Stopwatch) -> bool:
    """Takes one step and records it in the state and the logger; returns whether it was applied."""
    config, state, progress = run.config, run.state, run.progress
    first_sample = state.samples
    ratio = learning_rate_ratio(config.schedule, state.step, config.training.steps)
    seed_step(config.seed, first_sample, progress.data_group.rank, run.device)
    learning_rate = config.optimizer.learning_rate * ratio
    report = train_step(
        progress.engine, batches, learning_rate, run.device, run.step_metrics, run.fault_policy, state.recent_losses
    )
    state.samples += config.batch.global_size
    state.tokens += config.tokens_per_step()
    state.seconds = stopwatch.seconds()
    if report.applied:
        state.record_applied_step(config.batch.global_size, report.targets)
        for batch in batches.unpadded_batches:
            state.count_targets(batch)
        run.fault_policy.record_loss(report.loss, state.recent_losses)
    if state.target_error_counts is not None:  # of an adaptive masking strategy
        state.target_error_counts.end_step(state.samples, report.applied, progress.data_group)
    state.skipped_steps += not report.applied
    run.logger.log_step(report, state, last=state.step >= run.end_step)
    handle_fault(run, report, first_sample)
    slow = run.health.stragglers.update(report.gathered.forward_seconds)
    if slow is not None:
        run.logger.log_event("slow", asdict(slow), state, slow.message(state.step))
    return report.applied


def _will_save(run: Training) -> bool:
    """Whether the present weights will be saved on disk, or copied to the memory of nodes."""
    step = run.state.step
    return step >= run.end_step or _save_is_due(run) or run.checkpointer.replica_due(step)


def _save_is_due(run: Training) -> bool:
    step, tasks = run.state.step, run.tasks
    return (tasks is not None and step % tasks.interval == 0) or step % run.config.training.checkpoint_every == 0


def _evaluate_and_save_if_due(run: Training) -> None:
    """Evaluates and saves what is due after an applied step; the last step is evaluated before it is saved. After a
    signal tasks are left to the next session."""
    step, training, tasks = run.state.step, run.config.training, run.tasks
    if step >= run.end_step or step % training.evaluate_every == 0:
        _evaluate(run)
    if _save_is_due(run):
        _save(run)
    else:
        run.checkpointer.replicate_if_due(step)
    if tasks and step % tasks.interval == 0 and not run.stop.is_requested(run.progress.world_group):
        _evaluate_tasks(run, tasks)


def _run_missed_evaluation(run: Training) -> None:
    """Runs the evaluation that was due at the resumed step, if a signal prevented it, and saves the result in a new
    checkpoint if one was due at that step."""
    state, training = run.state, run.config.training
    is_last = state.step >= training.steps
    if not state.step or state.evaluated or not (is_last or state.step % training.evaluate_every == 0):
        return
    _evaluate(run)
    if state.evaluated and (is_last or state.step % training.checkpoint_every == 0):
        _save(run)


def _run_missed_tasks(run: Training) -> None:
    """Evaluates the tasks that were due at the resumed step, if the earlier session did not."""
    state, tasks, is_last = run.state, run.tasks, run.state.step >= run.config.training.steps
    if tasks is None or run.checkpointer.wait() is None or not (is_last or state.step % tasks.interval == 0):
        return
    if not run.progress.world_group.broadcast_object(run.logger.has_task_results(state)):
        _evaluate_tasks(run, tasks)


def _evaluate(run: Training) -> bool:
    """Evaluates, if there is a validation dataset; returns False if a signal interrupted it."""
    if run.evaluation is None:
        return True
    progress = run.progress
    result = run.evaluation.run(progress.engine, progress.state, lambda: run.stop.is_requested(progress.world_group))
    if result is None:
        return False
    run.state.validation = {"step": run.state.step, "loss": result.loss, "data": run.evaluation.data}
    run.logger.log_validation(result, run.state, run.evaluation.head)
    return True


def _evaluate_tasks(run: Training, tasks: TaskEvaluation) -> None:
    checkpoint = run.checkpointer.wait()
    if checkpoint is not None:
        run.logger.log_tasks(tasks.run(checkpoint), run.state)


def _save(run: Training) -> None:
    run.logger.log_event("checkpoint", {"stall_seconds": round(run.checkpointer.save(), 3)}, run.state)
    run.fault_policy.reset_rollbacks()


def _reason_to_stop(run: Training) -> Ending | None:
    """The reason to stop now, the same on every rank: a signal to any rank, or rank 0's clock before the run's last
    step; None: continue. If a background save has failed on any rank, raises its error. Collective."""
    training, state, world_group = run.config.training, run.state, run.progress.world_group
    is_over = training.max_seconds is not None and state.seconds >= training.max_seconds
    out_of_time = world_group.rank == 0 and is_over and state.step < training.steps
    flags = torch.tensor([run.stop.signal is not None, out_of_time, run.checkpointer.failed], dtype=torch.int32)
    stopped, out_of_time, failed = world_group.all_reduce_(flags).tolist()
    if failed:
        run.checkpointer.wait()
    if stopped:
        return "stopped"
    return "out of time" if out_of_time else None
