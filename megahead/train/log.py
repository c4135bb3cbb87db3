"""What a run reports: console, `metrics.jsonl` and boards. Only rank 0 writes."""

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
from megahead.wording import format_duration, format_range, format_si, pluralize


class RunLog:
    """A run's `metrics.jsonl`, to which each session appends an object a line, each of them at once; a last line that a
    killed session left unfinished is removed."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open("ab+")
        self._file.seek(0)
        self._file.truncate(self._file.read().rfind(b"\n") + 1)

    def record(self, state: TrainingState, fields: Mapping[str, Any]) -> None:
        """What happened (`fields`), and how far the run was then. UserError on a full disk."""
        where = {"step": state.step, "tokens": state.tokens, "seconds": round(state.seconds, 3)}
        with written(self._path):
            self._file.write(orjson.dumps(where | dict(fields)) + b"\n")
            self._file.flush()

    def has_tasks(self, step: int) -> bool:
        """Whether it holds what the tasks came to at `step`, to which no session or rollback has gone back since."""
        found = False
        self._file.seek(0)
        for record in read_records(self._file, "tasks", "session", "rollback"):
            if "tasks" in record:
                found = found or record["step"] == step
            else:
                found = found and record.get("session", {}).get("continues", record["step"]) >= step
        return found

    def close(self) -> None:
        """Nothing follows."""
        self._file.close()


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Turns an OSError inside of the block into a sentence about `path`, a log."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"`{path}` must take what the run logs, but cannot ({error.strerror or error}); make room, then start the "
            "run again: its checkpoints are unharmed."
        ) from None


def read_records(lines: Iterable[bytes], *kinds: str) -> Iterator[dict[str, Any]]:
    """Those lines of a log that tell one of `kinds`. One that is no JSON, as a machine that lost its power may leave,
    is passed over."""
    marks = [f'"{kind}":{{'.encode() for kind in kinds]
    for line in lines:
        if any(mark in line for mark in marks):
            try:
                yield orjson.loads(line)
            except orjson.JSONDecodeError:
                continue


class Interval:
    """Applied steps since it was last begun."""

    def __init__(self, auxiliary: AuxiliarySettings | None = None) -> None:
        self._auxiliary = auxiliary
        self._reports: list[StepReport] = []
        self._tokens, self._seconds, self._began = 0, 0.0, 0.0

    def begin(self, state: TrainingState) -> None:
        """Forgets all steps, and measures speed from here on."""
        self._reports.clear()
        self._tokens, self._seconds, self._began = state.tokens, state.seconds, time.monotonic()

    def add(self, report: StepReport) -> None:
        """Of the next step."""
        self._reports.append(report)

    def take_back(self, steps: int, state: TrainingState) -> None:
        """Forgets so many of the last ones; where none is left, speed is measured from here on."""
        del self._reports[max(len(self._reports) - steps, 0) :]
        if not self._reports:
            self.begin(state)

    def is_over(self, after_seconds: float) -> bool:
        """Whether it has steps, and lasts so long already."""
        return bool(self._reports) and time.monotonic() - self._began >= after_seconds

    def means(self, state: TrainingState) -> dict[str, float]:
        """Means over its steps, and their speed, under the names that they have in the log."""
        reports, seconds = self._reports, max(state.seconds - self._seconds, 1e-9)
        means = {
            "loss": _mean(r.loss for r in reports),
            "learning_rate": reports[-1].learning_rate,
            "gradient_norm": _mean(r.grad_norm for r in reports),
            "tokens_per_second": (state.tokens - self._tokens) / seconds,
            "step_seconds": seconds / len(reports),
            "step_cpu_seconds": _mean(r.cpu_seconds for r in reports),
            "candidates": _mean(r.candidates for r in reports),
            "skipped_steps": state.skipped_steps,
        }
        if self._auxiliary is not None:
            found = [self._auxiliary.means(r.auxiliary) for r in reports]
            means |= {
                f"{self._auxiliary.metric_prefix}_{name}": _mean(each[name] for each in found) for name in found[0]
            }
            means |= self._auxiliary.derived_metrics(means)
        return means | {name: _mean(r.counts[name] for r in reports) for name in reports[0].counts}


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


# The lines that a run prints while it trains: its progress, evaluations, and bad steps.


BadSamples = Sequence[tuple[int | None, range]]
"""(rank, its samples) of each bad micro-batch; rank None: all ranks."""

_MAX_NAMED = 4


def progress_line(
    scalars: Mapping[str, float],
    state: TrainingState,
    steps: int,
    perplexity: float | None,
    auxiliary: AuxiliarySettings | None = None,
) -> str:
    """The training values since the last line, of a run of `steps`; `perplexity`: the last held-out one, if any."""
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
    """For example: held out at step 500: perplexity 112.3, 1.402 bits per byte, accuracy 31.2% (pmi head)"""
    most = "at most " if result.upper_bound else ""
    whose, more = "", ""
    if auxiliary is not None and result.auxiliary is not None:
        whose, more = auxiliary.predictor_label, f"; {auxiliary.evaluation_text(result.auxiliary)}"
    bits = "" if result.bits_per_byte is None else f", {most}{result.bits_per_byte:.3f} bits per byte"
    return (
        f"held out at step {state.step:,}: {whose}perplexity {most}{result.perplexity:,.1f}{bits}, "
        f"accuracy {result.accuracy:.1%} ({head} head){more}"
    )


def describe_fault(report: StepReport, step: int, bad: BadSamples, state: TrainingState) -> str:
    """For example: step 12: spike (loss 9.1, gradient norm 7, scale 1) on rank 1, samples 88 to 89; 3 skipped so far"""
    where = [
        f"{'' if rank is None else f'rank {rank}, '}{format_range('sample', samples)}"
        for rank, samples in bad[:_MAX_NAMED]
    ]
    where += [f"{len(bad) - _MAX_NAMED} more"] if len(bad) > _MAX_NAMED else []
    kind = report.fault.kind if report.fault else "good"
    return (
        f"step {step:,}: {kind} (loss {report.loss:.4g}, gradient norm {report.grad_norm:.4g}, scale "
        f"{report.loss_scale:g}) on {'; '.join(where)}; {state.skipped_steps} skipped so far"
    )


MeshShape = dict[str, int]
"""`data` and `tensor` ranks, and how many ranks are `waiting`."""


def mesh_before(metrics: Path, now: MeshShape) -> MeshShape | None:
    """The mesh of the session before, by its log; None if that is not known, or the same as `now`."""
    if not metrics.exists():
        return None
    with metrics.open("rb") as lines:
        meshes = [record["session"].get("mesh") for record in read_records(lines, "session")]
    return meshes[-1] if meshes and meshes[-1] != now else None


def describe_mesh(now: MeshShape, before: MeshShape) -> tuple[str, str]:
    """The banner's line where it changed."""
    return "mesh now", f"{_ranks(now)}; {_ranks(before)} before"


def _ranks(mesh: MeshShape) -> str:
    """For example: 1 tensor x 2 data ranks, 1 waits."""
    waiting = mesh["waiting"]
    rest = f", {waiting} {'waits' if waiting == 1 else 'wait'}" if waiting else ""
    return f"{mesh['tensor']} tensor x {pluralize(mesh['data'], 'data rank')}{rest}"


_DONE = {"apply": "applied all the same", "skip": "skipped", "rollback": "rolled back", "stop": "the run ends"}
_QUIETER = 10
"""In a log file or a pipe progress lines are this many times rarer than in a terminal."""


class RunLogger:
    """Writes the means of the steps between two lines, and what happens beside them. Does nothing without a `lease`,
    rank 0's claim on the run folder, which a later session may take over."""

    utilization: Utilization | None = None
    """By what a step of the phase takes; None: only speeds are told."""

    def __init__(self, config: RunConfig, *, lease: Lease | None, mesh: MeshShape) -> None:
        self._folder = config.folder()
        self._total_steps = config.training.steps
        self._log_seconds = config.training.log_seconds
        self._print_seconds = self._log_seconds * (1 if sys.stdout.isatty() else _QUIETER)
        self._active, self._lease = lease is not None, lease
        self._auxiliary = config.objective.auxiliary()
        self._interval = Interval(self._auxiliary)
        self._last_printed = -math.inf
        self._perplexity: float | None = None
        if self._active:
            self._mesh, self._mesh_before = mesh, mesh_before(self._folder.metrics, mesh)
            self._log = RunLog(self._folder.metrics)
            self._boards = open_boards(config)

    def banner(self, lines: list[tuple[str, str]], start: ResumePoint, progress: Progress) -> None:
        """Prints what will be trained, the checkpoint that it goes on from, the damaged ones that were passed over to
        find it, and those that the next save orphans; records that, up to which step the log's lines still count,
        and whether a new phase begins."""
        if not self._active:
            return
        resumed, run, config = start.checkpoint, progress.history, progress.phase.config
        source, continues = None if resumed is None else run.name_of(resumed), run.last_common_step()
        fields: dict[str, Any] = {"resumed": source, "continues": continues} | start.fields() | {"mesh": self._mesh}
        if before := self._mesh_before:
            self._mesh_before = None
            lines = [*lines, describe_mesh(self._mesh, before)]
            fields["mesh_before"] = before
        lines = [*lines, *start.lines(), *start.new_schedule(config)]
        if orphaned := run.orphaned_by_next_save():
            lines.append(
                ("orphaned", f"from the next save on: {', '.join(orphaned)}, which this run does not continue")
            )
        lines.append(("progress", f"at most a line every {self._print_seconds:g} s; the first step takes longest"))
        for board in self._boards:
            board.go_back(continues)
        fields |= {"new_phase": True} if start.begins_phase(config) else {}
        self.event("session", fields, progress.state, "\n".join(f"{name:<12}{value}" for name, value in lines))

    def event(
        self,
        kind: str,
        fields: Mapping[str, Any],
        state: TrainingState,
        message: str | None = None,
        curves: Mapping[str, float] | None = None,
    ) -> None:
        """Records what happened as `kind`, adds its `curves`, and prints the sentence about it, if there is one."""
        if self._active:
            self._log.record(state, {kind: fields})
            if curves is not None:
                self._draw(kind, curves, state.step)
            if message is not None:
                self.print_line(message)

    def start(self, state: TrainingState) -> None:
        """Before the first step of a phase."""
        self._interval.begin(state)

    def step(self, report: StepReport, state: TrainingState, *, last: bool) -> None:
        """Records a step; writes a line if one is due, or when it is the `last` of its phase."""
        if not self._active:
            return
        if report.applied:
            self._interval.add(report)
        if self._interval.is_over(0.0 if last else self._log_seconds):
            self._write(state, last)

    def finish(self, state: TrainingState) -> None:
        """After the last step of a session: writes the line of those since the last one, if there are any."""
        if self._active and self._interval.is_over(0.0):
            self._write(state, last=True)

    def fault(self, report: StepReport, bad: BadSamples, action: Action, state: TrainingState) -> str:
        """Writes a bad step and returns the sentence about it. `bad`: (rank, its samples) of each bad micro-batch;
        `action`: what the fault policy does about it."""
        assert report.fault is not None
        where = [{"rank": rank, "first": samples.start, "last": samples.stop - 1} for rank, samples in bad]
        step = state.step if report.applied else state.step + 1
        message = describe_fault(report, step, bad, state)
        fields = {"kind": report.fault.kind, "action": action, "scale": report.loss_scale, "where": where}
        values = {"loss": repr(report.loss), "gradient_norm": repr(report.grad_norm)}  # no nan or inf in JSON
        self.event("fault", fields | values, state, f"{message}: {_DONE[action]}")
        return message

    def rolled_back(self, checkpoint: Path | None, steps: int, state: TrainingState) -> None:
        """Records a rollback of `steps` steps to `checkpoint` (None: there was none); the next line leaves them out."""
        if checkpoint is None:
            self.print_line("no checkpoint to go back to yet: skipped")
            return
        self._interval.take_back(steps, state)
        if self._active:
            for board in self._boards:
                board.go_back(state.step)
            self.event("rollback", {"checkpoint": checkpoint.name}, state, f"went back to {checkpoint}")

    def validation(self, result: ValidationResult, state: TrainingState, head: str) -> None:
        """Writes an evaluation; `head`: what predicted, `pmi` (the training-free head), `tied` or `trained`."""
        found = {name: value for name, value in asdict(result).items() if name != "auxiliary"}
        if self._auxiliary is not None and result.auxiliary is not None:
            found[self._auxiliary.metric_prefix] = result.auxiliary
        self._perplexity = result.perplexity
        curves = {name: value for name, value in found.items() if isinstance(value, float)}
        message = held_out_line(result, state, head, self._auxiliary)
        self.event("validation", found | {"head": head}, state, message, curves)

    def tasks(self, results: Sequence[TaskResult], state: TrainingState) -> None:
        """Writes the results of tasks: value and standard error of each metric."""
        found = {
            result.task: {score.metric: {"value": score.value, "stderr": score.stderr} for score in result.scores}
            for result in results
        }
        scores = [(result.task, score) for result in results for score in result.scores]
        message = ", ".join(f"{task} {score.metric} {score.value:.4g}" for task, score in scores)
        lines = [
            f"tasks at step {state.step:,}: {message}",
            *filter(None, (each.truncation_note() for each in results)),
        ]
        curves = {f"{task}/{score.metric}": score.value for task, score in scores}
        self.event("tasks", found, state, "\n".join(lines), curves)

    def has_tasks(self, state: TrainingState) -> bool:
        """Whether results of tasks at this step were written, also by an earlier session."""
        return self._active and self._log.has_tasks(state.step)

    def print_line(self, text: str) -> None:
        """Prints `text` if active."""
        if self._active:
            print(text, flush=True)

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

    def _draw(self, group: str, values: Mapping[str, float], step: int) -> None:
        """Each value as `group`/NAME. UserError on a full disk."""
        named = {f"{group}/{name}": value for name, value in values.items()}
        for board in self._boards:
            with written(self._folder.tensorboard):  # or what an earlier call left to be written
                board.add(named, step)

    def _write(self, state: TrainingState, last: bool) -> None:
        if self._lease is not None:
            self._lease.check()
        scalars = self._interval.means(state)
        if self.utilization is not None:
            scalars |= self.utilization.of(scalars["tokens_per_second"], scalars["candidates"])
        self._log.record(state, scalars)
        self._draw("train", scalars, state.step)
        if time.monotonic() - self._last_printed >= self._print_seconds or last:
            self.print_line(progress_line(scalars, state, self._total_steps, self._perplexity, self._auxiliary))
            self._last_printed = time.monotonic()
        self._interval.begin(state)
