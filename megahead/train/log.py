"""Logs a run on rank 0: to the console, `metrics.jsonl` and boards (TensorBoard and trackers)."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from megahead.config.auxiliary import AuxiliarySettings
from megahead.config.run import RunConfig
from megahead.errors import UserError
from megahead.evaluate.perplexity import ValidationResult
from megahead.evaluate.results import TaskResult
from megahead.train.boards import open_boards
from megahead.train.faults import Action
from megahead.train.progress import Progress, TrainingState
from megahead.train.saving import Lease
from megahead.train.start import ResumePoint
from megahead.train.step import StepReport, Utilization
from megahead.wording import format_duration, format_range, format_si, pluralize, print_line


class RunLog:
    """A run's `metrics.jsonl`, to which all sessions append one JSON object a line, each flushed at once. Opening it
    removes an incomplete last line, which a killed session may have written."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open("ab+")
        self._file.seek(0)
        self._file.truncate(self._file.read().rfind(b"\n") + 1)

    def record(self, state: TrainingState, fields: Mapping[str, Any]) -> None:
        """Appends `fields` with the run's current step, tokens and seconds. UserError on a full disk."""
        position = {"step": state.step, "tokens": state.tokens, "seconds": round(state.seconds, 3)}
        with explain_write_error(self._path):
            self._file.write(orjson.dumps(position | dict(fields)) + b"\n")
            self._file.flush()

    def has_task_results(self, step: int) -> bool:
        """Whether it has the tasks' results at `step`, not undone by a later session or rollback to an earlier step."""
        has_results = False
        self._file.seek(0)
        for record in read_records(self._file, "tasks", "session", "rollback"):
            if "tasks" in record:
                has_results = has_results or record["step"] == step
            else:
                has_results = has_results and record.get("session", {}).get("continues", record["step"]) >= step
        return has_results

    def close(self) -> None:
        self._file.close()


@contextmanager
def explain_write_error(path: Path) -> Iterator[None]:
    """Turns an OSError in the block into a UserError about the log `path`."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"`{path}` must take what the run logs, but cannot ({error.strerror or error}); make room, then start the "
            "run again: its checkpoints are unharmed."
        ) from None


def read_records(lines: Iterable[bytes], *kinds: str) -> Iterator[dict[str, Any]]:
    """The records of a log that have one of `kinds`. Skips invalid JSON, which a power failure may leave."""
    patterns = [f'"{kind}":{{'.encode() for kind in kinds]
    for line in lines:
        if any(pattern in line for pattern in patterns):
            try:
                yield orjson.loads(line)
            except orjson.JSONDecodeError:
                continue


class LogInterval:
    """The applied steps between two records of training metrics."""

    def __init__(self, auxiliary: AuxiliarySettings | None = None) -> None:
        self._auxiliary = auxiliary
        self._reports: list[StepReport] = []
        self._start_tokens, self._start_seconds, self._start_time = 0, 0.0, 0.0

    def reset(self, state: TrainingState) -> None:
        """Starts a new interval at `state`."""
        self._reports.clear()
        self._start_tokens, self._start_seconds, self._start_time = state.tokens, state.seconds, time.monotonic()

    def add(self, report: StepReport) -> None:
        """Adds the report of the next step."""
        self._reports.append(report)

    def drop_last(self, steps: int, state: TrainingState) -> None:
        """Removes the last `steps` reports; resets the interval if none remains."""
        del self._reports[max(len(self._reports) - steps, 0) :]
        if not self._reports:
            self.reset(state)

    def is_over(self, min_seconds: float) -> bool:
        """Whether it has steps, and has lasted at least `min_seconds`."""
        return bool(self._reports) and time.monotonic() - self._start_time >= min_seconds

    def means(self, state: TrainingState) -> dict[str, float]:
        """Means over its steps, and their speed, by their names in the log."""
        reports, seconds = self._reports, max(state.seconds - self._start_seconds, 1e-9)
        means = {
            "loss": _mean(r.loss for r in reports),
            "learning_rate": reports[-1].learning_rate,
            "gradient_norm": _mean(r.grad_norm for r in reports),
            "tokens_per_second": (state.tokens - self._start_tokens) / seconds,
            "step_seconds": seconds / len(reports),
            "step_cpu_seconds": _mean(r.cpu_seconds for r in reports),
            "candidates": _mean(r.candidates for r in reports),
            "skipped_steps": state.skipped_steps,
        }
        if self._auxiliary is not None:
            prefix = self._auxiliary.metric_prefix
            step_means = [self._auxiliary.means(r.gathered.auxiliary_sums) for r in reports]
            means |= {f"{prefix}_{name}": _mean(step[name] for step in step_means) for name in step_means[0]}
            means |= self._auxiliary.derived_metrics(means)
        return means | {name: _mean(r.engine_metrics[name] for r in reports) for name in reports[0].engine_metrics}


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


BadSamples = Sequence[tuple[int | None, range]]
"""(rank, its samples) of each bad micro-batch; rank None: all ranks."""

_MAX_LISTED = 4


def progress_line(
    scalars: Mapping[str, float],
    state: TrainingState,
    steps: int,
    perplexity: float | None,
    auxiliary: AuxiliarySettings | None = None,
) -> str:
    """The training metrics `scalars` of a run of `steps`; `perplexity`: the last held-out one, if any."""
    remaining = (steps - state.step) * scalars["step_seconds"]
    parts = [
        f"step {state.step:>{len(str(steps))}}/{steps}",
        f"loss {scalars['loss']:.4f}",
        f"lr {scalars['learning_rate']:.2e}",
        f"|g| {scalars['gradient_norm']:.2f}",
        f"{format_si(scalars['tokens_per_second'])} tokens/s",
    ]
    if auxiliary is not None:
        parts.append(auxiliary.progress_text(scalars))
    if "mfu" in scalars:
        parts.append(f"MFU {scalars['mfu']:.1%}")
    if scalars["candidates"]:
        parts.append(pluralize(scalars["candidates"], "candidate", ",.0f"))
    if perplexity is not None:
        parts.append(f"held out {perplexity:,.1f}")
    if state.skipped_steps:
        parts.append(f"{state.skipped_steps:,} skipped")
    return "  ".join([*parts, f"ETA {format_duration(remaining)}"])


def held_out_line(
    result: ValidationResult, state: TrainingState, head: str, auxiliary: AuxiliarySettings | None = None
) -> str:
    """For example: held out at step 500: perplexity 112.3, 1.402 bits per byte, accuracy 31.2% (pmi head); with
    ELECTRA: generator's perplexity 112.3, ..."""
    bound = "at most " if result.upper_bound else ""
    prefix, suffix = "", ""
    if auxiliary is not None and result.auxiliary is not None:
        prefix, suffix = auxiliary.perplexity_prefix, f"; {auxiliary.evaluation_text(result.auxiliary)}"
    bits = "" if result.bits_per_byte is None else f", {bound}{result.bits_per_byte:.3f} bits per byte"
    return (
        f"held out at step {state.step:,}: {prefix}perplexity {bound}{result.perplexity:,.1f}{bits}, "
        f"accuracy {result.accuracy:.1%} ({head} head){suffix}"
    )


def describe_fault(report: StepReport, step: int, bad: BadSamples, state: TrainingState) -> str:
    """For example: step 12: spike (loss 9.1, gradient norm 7, scale 1) on rank 1, samples 88 to 89; 3 skipped so far"""
    texts = [f"{'' if rank is None else f'rank {rank}, '}{format_range('sample', samples)}" for rank, samples in bad]
    sources = texts[:_MAX_LISTED] + ([f"{len(bad) - _MAX_LISTED} more"] if len(bad) > _MAX_LISTED else [])
    kind = report.fault.kind if report.fault else "good"
    return (
        f"step {step:,}: {kind} (loss {report.loss:.4g}, gradient norm {report.grad_norm:.4g}, scale "
        f"{report.loss_scale:g}) on {'; '.join(sources)}; {state.skipped_steps} skipped so far"
    )


MeshShape = dict[str, int]
"""The numbers of `data` and `tensor` ranks, and of `waiting` ones: spare ranks, which do not train."""


def previous_mesh(metrics: Path, mesh: MeshShape) -> MeshShape | None:
    """The mesh of the previous session in its log; None if that is unknown, or the same as `mesh`."""
    if not metrics.exists():
        return None
    with metrics.open("rb") as lines:
        meshes = [record["session"].get("mesh") for record in read_records(lines, "session")]
    return meshes[-1] if meshes and meshes[-1] != mesh else None


def describe_mesh(mesh: MeshShape, previous: MeshShape) -> tuple[str, str]:
    """The banner's line after a change."""
    return "mesh now", f"{_describe_ranks(mesh)}; {_describe_ranks(previous)} before"


def _describe_ranks(mesh: MeshShape) -> str:
    """For example: 1 tensor x 2 data ranks, 1 waits."""
    waiting = mesh["waiting"]
    suffix = f", {waiting} {'waits' if waiting == 1 else 'wait'}" if waiting else ""
    return f"{mesh['tensor']} tensor x {pluralize(mesh['data'], 'data rank')}{suffix}"


_ACTION_TEXTS = {"apply": "applied all the same", "skip": "skipped", "rollback": "rolled back", "stop": "the run ends"}
_PRINT_INTERVAL_RATIO = 10
"""Progress lines in a log file or pipe are this many times as far apart as in a terminal."""


class RunLogger:
    """Writes the mean metrics of each interval of steps, and events. Does nothing without a `lease`, rank 0's claim on
    the run folder, which a later session may take over."""

    utilization: Utilization | None = None
    """Computes the FLOPs metrics of the current phase; None: FLOPs are not logged."""

    def __init__(self, config: RunConfig, *, lease: Lease | None, mesh: MeshShape) -> None:
        self._folder = config.folder()
        self._total_steps = config.training.steps
        self._log_seconds = config.training.log_seconds
        self._print_seconds = self._log_seconds * (1 if sys.stdout.isatty() else _PRINT_INTERVAL_RATIO)
        self._active, self._lease = lease is not None, lease
        self._auxiliary = config.objective.auxiliary()
        self._interval = LogInterval(self._auxiliary)
        self._last_print_time = -math.inf
        self._perplexity: float | None = None
        if self._active:
            self._mesh, self._previous_mesh = mesh, previous_mesh(self._folder.metrics, mesh)
            self._log = RunLog(self._folder.metrics)
            self._boards = open_boards(config)

    def check_lease(self) -> None:
        """UserError if another session has taken over the run folder."""
        if self._lease is not None:
            self._lease.check()

    def log_session(self, lines: list[tuple[str, str]], start: ResumePoint, progress: Progress) -> None:
        """Prints the banner: `lines`, the checkpoint that the session or phase resumes from, damaged ones that were
        skipped, and those that the next save orphans. Records them, the step up to which earlier records are valid, and
        whether a new phase starts."""
        if not self._active:
            return
        resumed, history, config = start.checkpoint, progress.history, progress.phase.config
        source, last_valid_step = None if resumed is None else history.name_of(resumed), history.last_common_step()
        fields: dict[str, Any] = {"resumed": source, "continues": last_valid_step}
        fields |= start.log_fields() | {"mesh": self._mesh}
        if previous := self._previous_mesh:
            self._previous_mesh = None
            lines = [*lines, describe_mesh(self._mesh, previous)]
            fields["mesh_before"] = previous
        lines = [*lines, *start.banner_lines(), *start.describe_schedule_change(config)]
        if orphaned := history.orphaned_by_next_save():
            names = ", ".join(orphaned)
            lines.append(("orphaned", f"from the next save on: {names}, which this run does not continue"))
        lines.append(("progress", f"at most a line every {self._print_seconds:g} s; the first step takes longest"))
        for board in self._boards:
            board.discard_after(last_valid_step)
        fields |= {"new_phase": True} if start.starts_phase(config) else {}
        self.log_event("session", fields, progress.state, "\n".join(f"{name:<12}{value}" for name, value in lines))

    def log_event(
        self,
        kind: str,
        fields: Mapping[str, Any],
        state: TrainingState,
        message: str | None = None,
        curves: Mapping[str, float] | None = None,
    ) -> None:
        """Records `fields` as `kind`, adds `curves` to the boards, and prints `message`, if there is one."""
        if self._active:
            self._record(state, {kind: fields})
            if curves is not None:
                self._add_to_boards(kind, curves, state.step)
            if message is not None:
                self.print_line(message)

    def start_interval(self, state: TrainingState) -> None:
        """Must be called before the first step of a phase."""
        self._interval.reset(state)

    def log_step(self, report: StepReport, state: TrainingState, *, last: bool) -> None:
        """Adds a step to the interval; writes the interval if it is over or the step is the `last` of its phase."""
        if not self._active:
            return
        if report.applied:
            self._interval.add(report)
        if self._interval.is_over(0.0 if last else self._log_seconds):
            self._write(state, last)

    def flush(self, state: TrainingState) -> None:
        """Writes the interval if it has steps."""
        if self._active and self._interval.is_over(0.0):
            self._write(state, last=True)

    def log_fault(self, report: StepReport, bad: BadSamples, action: Action, state: TrainingState) -> str:
        """Logs a bad step and the fault policy's `action`; returns the message."""
        assert report.fault is not None
        sources = [{"rank": rank, "first": samples.start, "last": samples.stop - 1} for rank, samples in bad]
        step = state.step if report.applied else state.step + 1
        message = describe_fault(report, step, bad, state)
        fields = {"kind": report.fault.kind, "action": action, "scale": report.loss_scale, "where": sources}
        values = {"loss": repr(report.loss), "gradient_norm": repr(report.grad_norm)}  # no nan or inf in JSON
        self.log_event("fault", fields | values, state, f"{message}: {_ACTION_TEXTS[action]}")
        return message

    def log_rollback(self, checkpoint: Path | None, steps: int, state: TrainingState) -> None:
        """Logs a rollback of `steps` steps to `checkpoint` (None: there was none); drops these from the interval."""
        if checkpoint is None:
            self.print_line("no checkpoint to go back to yet: skipped")
            return
        self._interval.drop_last(steps, state)
        if self._active:
            for board in self._boards:
                board.discard_after(state.step)
            self.log_event("rollback", {"checkpoint": checkpoint.name}, state, f"rolled back to {checkpoint}")

    def log_validation(self, result: ValidationResult, state: TrainingState, head: str) -> None:
        """Logs an evaluation with the head `pmi` (the training-free head), `tied` or `trained`."""
        metrics = {name: value for name, value in asdict(result).items() if name != "auxiliary"}
        if self._auxiliary is not None and result.auxiliary is not None:
            metrics[self._auxiliary.metric_prefix] = result.auxiliary
        self._perplexity = result.perplexity
        curves = {name: value for name, value in metrics.items() if isinstance(value, float)}
        message = held_out_line(result, state, head, self._auxiliary)
        self.log_event("validation", metrics | {"head": head}, state, message, curves)

    def log_tasks(self, results: Sequence[TaskResult], state: TrainingState) -> None:
        """Logs the results of tasks: value and standard error of each metric."""
        fields = {
            result.task: {score.metric: {"value": score.value, "stderr": score.stderr} for score in result.scores}
            for result in results
        }
        scores = [(result.task, score) for result in results for score in result.scores]
        message = ", ".join(f"{task} {score.metric} {score.value:.4g}" for task, score in scores)
        notes = filter(None, (result.truncation_note() for result in results))
        lines = [f"tasks at step {state.step:,}: {message}", *notes]
        curves = {f"{task}/{score.metric}": score.value for task, score in scores}
        self.log_event("tasks", fields, state, "\n".join(lines), curves)

    def has_task_results(self, state: TrainingState) -> bool:
        """Whether this or an earlier session has logged the tasks at this step."""
        return self._active and self._log.has_task_results(state.step)

    def print_line(self, text: str) -> None:
        """Prints `text` if active."""
        if self._active:
            print_line(text)

    def close(self, ending: str, state: TrainingState) -> None:
        """Prints the last line and closes the logs."""
        if self._active:
            self.print_line(
                f"{ending} at step {state.step:,}, {format_si(state.tokens)} tokens, "
                f"{format_duration(state.seconds)} of training: {self._folder}"
            )
            self._log.close()
            for board in self._boards:
                board.close()

    def _record(self, state: TrainingState, fields: Mapping[str, Any]) -> None:
        """UserError if another session has taken over, or on a full disk."""
        self.check_lease()
        self._log.record(state, fields)

    def _add_to_boards(self, group: str, values: Mapping[str, float], step: int) -> None:
        """Adds each value as `group`/NAME. UserError on a full disk, also for values buffered by an earlier call."""
        curves = {f"{group}/{name}": value for name, value in values.items()}
        for board in self._boards:
            with explain_write_error(self._folder.tensorboard):
                board.add(curves, step)

    def _write(self, state: TrainingState, last: bool) -> None:
        scalars = self._interval.means(state)
        if self.utilization is not None:
            scalars |= self.utilization.metrics(scalars["tokens_per_second"], scalars["candidates"])
        self._record(state, scalars)
        self._add_to_boards("train", scalars, state.step)
        if time.monotonic() - self._last_print_time >= self._print_seconds or last:
            self.print_line(progress_line(scalars, state, self._total_steps, self._perplexity, self._auxiliary))
            self._last_print_time = time.monotonic()
        self._interval.reset(state)
