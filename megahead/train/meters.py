"""What a run reports: lines on the console, `metrics.jsonl`, TensorBoard and W&B. Only rank 0 writes."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megahead.config import RunConfig
from megahead.evaluate import ValidationResult
from megahead.evaluate.results import TaskResult
from megahead.mirror import News
from megahead.train.boards import Boards
from megahead.train.copier import Renewal
from megahead.train.faults import Action
from megahead.train.hold import Hold
from megahead.train.interval import Interval
from megahead.train.log_lines import BadSamples, describe_fault, held_out_line, progress_line
from megahead.train.mesh_change import MeshChange, MeshShape
from megahead.train.pace import SlowRank
from megahead.train.progress import Progress
from megahead.train.replicas import OddReplica
from megahead.train.run_log import RunLog
from megahead.train.start import Start
from megahead.train.state import TrainingState
from megahead.train.step import StepReport
from megahead.train.utilization import Utilization
from megahead.wording import duration, thousands

_DONE = {"apply": "applied all the same", "skip": "skipped", "rollback": "rolled back", "stop": "the run ends"}
_QUIETER = 10
"""In a log file or a pipe progress lines are this many times rarer than in a terminal."""


class Meters:
    """Writes the means of the steps between two lines, and what happens beside them. Does nothing without a `hold`,
    rank 0's claim on the run folder, which a later session may take over."""

    utilization: Utilization | None = None
    """By what a step of the phase takes; None: only speeds are told."""

    def __init__(self, config: RunConfig, *, hold: Hold | None, mesh: MeshShape) -> None:
        self._folder = config.folder()
        self._total_steps = config.training.steps
        self._log_seconds = config.training.log_seconds
        self._print_seconds = self._log_seconds * (1 if sys.stdout.isatty() else _QUIETER)
        self._active, self._hold = hold is not None, hold
        self._interval = Interval(config.objective)
        self._last_printed = -math.inf
        self._perplexity: float | None = None
        if self._active:
            self._mesh = MeshChange.since(self._folder.metrics, mesh)
            self._log = RunLog(self._folder.metrics)
            self._boards = Boards(config)

    def banner(self, lines: list[tuple[str, str]], start: Start, progress: Progress) -> None:
        """Prints what will be trained, the checkpoint that it goes on from, the damaged ones that were passed over to
        find it, and those that the next save sets aside; records that, up to which step the log's lines still count,
        and whether a new phase begins."""
        if not self._active:
            return
        resumed, lineage = start.checkpoint, progress.lineage
        lines = [*lines, *self._mesh.lines(), *start.lines(), *start.new_schedule(progress.phase.config)]
        if aside := lineage.to_be_abandoned():
            lines.append(("set aside", f"at the next save: {', '.join(aside)}, which this run does not continue"))
        lines.append(("progress", f"at most a line every {self._print_seconds:g} s; the first step takes longest"))
        self.print_line("\n".join(f"{name:<12}{value}" for name, value in lines))
        source, continues = None if resumed is None else lineage.name_of(resumed), max(lineage.tip, 0)
        self._boards.go_back(continues)
        facts = {"resumed": source, "continues": continues} | start.facts() | self._mesh.facts()
        new_phase = {"new_phase": True} if start.begins_phase(progress.phase.config) else {}
        self._mesh = MeshChange(self._mesh.now)
        self._log.record(progress.state, {"session": facts | new_phase})

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
        `action`: what the guard does about it."""
        assert report.fault is not None
        where = [{"rank": rank, "first": samples.start, "last": samples.stop - 1} for rank, samples in bad]
        step = state.step if report.applied else state.step + 1
        sentence = describe_fault(report, step, bad, state)
        if self._active:
            facts = {"kind": report.fault.kind, "action": action, "scale": report.loss_scale, "where": where}
            values = {"loss": repr(report.loss), "gradient_norm": repr(report.grad_norm)}  # no nan or inf in JSON
            self._log.record(state, {"fault": facts | values})
            self.print_line(f"{sentence}: {_DONE[action]}")
        return sentence

    def slow(self, rank: SlowRank, state: TrainingState) -> None:
        """Writes that a rank is slow."""
        if self._active:
            self._log.record(state, {"slow": asdict(rank)})
            self.print_line(rank.sentence(state.step))

    def odd_replica(self, odd: OddReplica, hosts: Sequence[str], policy: str, state: TrainingState) -> str:
        """Writes that replicas differ, and returns the sentence about it."""
        sentence = odd.sentence(state.step, hosts)
        if self._active:
            self._log.record(state, {"replica": asdict(odd) | {"action": policy}})
            self.print_line(sentence)
        return sentence

    def rolled_back(self, checkpoint: Path | None, steps: int, state: TrainingState) -> None:
        """Records a rollback of `steps` steps to `checkpoint` (None: there was none); the next line leaves them out."""
        if checkpoint is None:
            self.print_line("no checkpoint to go back to yet: skipped")
            return
        self._interval.take_back(steps, state)
        if self._active:
            self._log.record(state, {"rollback": {"checkpoint": checkpoint.name}})
            self._boards.go_back(state.step)
            self.print_line(f"went back to {checkpoint}")

    def saved(self, stall: float, state: TrainingState) -> None:
        """Records a checkpoint, and for how many seconds training waited for it."""
        if self._active:
            self._log.record(state, {"checkpoint": {"stall_seconds": round(stall, 3)}})

    def copied(self, renewal: Renewal, state: TrainingState) -> None:
        """Records a copy in memory, or why there is none."""
        if self._active:
            self._log.record(state, {"copy": renewal.facts})
            if renewal.sentence is not None:
                self.print_line(renewal.sentence)

    def mirrored(self, news: Sequence[News], state: TrainingState) -> None:
        """Records what became of checkpoints on their way to the mirror."""
        for each in news:
            self._log.record(state, {"mirror": each.facts})
            if each.sentence is not None:
                self.print_line(each.sentence)

    def validation(self, result: ValidationResult, state: TrainingState, head: str) -> None:
        """Writes an evaluation; `head`: what predicted, `pmi` (the training-free head), `tied` or `trained`."""
        if not self._active:
            return
        self._log.record(state, {"validation": asdict(result) | {"head": head}})
        self._perplexity = result.perplexity
        found = {name: value for name, value in asdict(result).items() if isinstance(value, float)}
        self._boards.add("validation", found, state.step)
        self.print_line(held_out_line(result, state, head))

    def tasks(self, results: Sequence[TaskResult], state: TrainingState) -> None:
        """Writes the results of tasks: value and standard error of each metric."""
        if not self._active:
            return
        scores = [(result.task, score) for result in results for score in result.scores]
        record: dict[str, dict[str, Any]] = {result.task: {} for result in results}
        for task, score in scores:
            record[task][score.metric] = {"value": score.value, "stderr": score.stderr}
        self._log.record(state, {"tasks": record})
        self._boards.add("tasks", {f"{task}/{score.metric}": score.value for task, score in scores}, state.step)
        sentence = ", ".join(f"{task} {score.metric} {score.value:.4g}" for task, score in scores)
        self.print_line(f"tasks at step {state.step:,}: {sentence}")

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
                f"{ending} at step {state.step:,}, {thousands(state.tokens)} tokens, "
                f"{duration(state.seconds)} of training: {self._folder}"
            )
            self._log.close()
            self._boards.close()

    def _write(self, state: TrainingState, last: bool) -> None:
        if self._hold is not None:
            self._hold.check()
        scalars = self._interval.means(state)
        if self.utilization is not None:
            scalars |= self.utilization.of(scalars["tokens_per_second"], scalars["candidates"])
        self._log.record(state, scalars)
        self._boards.add("train", scalars, state.step)
        if time.monotonic() - self._last_printed >= self._print_seconds or last:
            self.print_line(progress_line(scalars, state, self._total_steps, self._perplexity))
            self._last_printed = time.monotonic()
        self._interval.begin(state)
