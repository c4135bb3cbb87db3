"""What a run reports: lines on the console, `metrics.jsonl`, TensorBoard and W&B. Only rank 0 writes."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from megahead.config import RunConfig
from megahead.evaluate import ValidationResult
from megahead.evaluate.results import TaskResult
from megahead.mirror import News
from megahead.train.boards import Boards
from megahead.train.copier import Renewal
from megahead.train.faults import Action
from megahead.train.hold import Hold
from megahead.train.lineage import Lineage
from megahead.train.log_lines import BadSamples, describe_fault, progress_line, told_apart
from megahead.train.mesh_change import MeshChange, MeshShape
from megahead.train.pace import SlowRank
from megahead.train.persistence import Start
from megahead.train.replicas import OddReplica
from megahead.train.state import TrainingState
from megahead.train.step import StepReport
from megahead.train.utilization import Utilization
from megahead.wording import duration, thousands

_DONE = {"apply": "applied all the same", "skip": "skipped", "rollback": "rolled back", "stop": "the run ends"}
_QUIETER = 10
"""In a log file or a pipe progress lines are this many times rarer than in a terminal."""


class Meters:
    """Collects the steps between two log lines and writes their means. Does nothing without a `hold`, rank 0's
    claim on the run folder, which a later session may take over."""

    utilization: Utilization | None = None
    """By what a step of the phase takes; None: only speeds are told."""

    def __init__(self, config: RunConfig, *, hold: Hold | None, mesh: MeshShape) -> None:
        self._folder = config.folder()
        self._total_steps = config.training.steps
        asked = config.objective.replaced_tokens
        self._detection_weight = 0.0 if asked is None else asked.weight
        self._log_seconds = config.training.log_seconds
        self._print_seconds = self._log_seconds * (1 if sys.stdout.isatty() else _QUIETER)
        self._active, self._hold = hold is not None, hold
        self._reports: list[StepReport] = []
        self._tokens_logged: int | None = None
        self._seconds_logged = 0.0
        self._last_logged = 0.0
        self._last_printed = -math.inf
        self._perplexity: float | None = None
        if self._active:
            self._mesh = MeshChange.since(self._folder.metrics, mesh)
            self._log = _open_log(self._folder.metrics)
            self._boards = Boards(config)

    def banner(
        self,
        lines: list[tuple[str, str]],
        state: TrainingState,
        start: Start,
        lineage: Lineage,
        new_phase: bool = False,
    ) -> None:
        """Prints what will be trained, the checkpoint that it goes on from, and the damaged ones that were passed over
        to find it; records that, and whether it is another phase's (`new_phase`). `lineage`: which of the folder's
        checkpoints led to the weights (those up to step `tip`); later ones are set aside by the next save."""
        if not self._active:
            return
        resumed, to_be_abandoned = start.checkpoint, lineage.to_be_abandoned()
        lines = [*lines, *self._mesh.lines(), *start.lines()]
        if to_be_abandoned:
            lines += [
                ("set aside", f"at the next save: {', '.join(to_be_abandoned)}, which this run does not continue")
            ]
        lines += [("progress", f"at most a line every {self._print_seconds:g} s; the first step takes longest")]
        self.print_line("\n".join(f"{name:<12}{value}" for name, value in lines))
        source = None if resumed is None else lineage.name_of(resumed)
        facts = {"resumed": source, "continues": max(lineage.tip, 0)} | start.facts() | self._mesh.facts()
        self._mesh = MeshChange(self._mesh.now)
        self._record(state, {"session": facts | ({"new_phase": True} if new_phase else {})})

    def start(self, state: TrainingState) -> None:
        """Starts a new measurement of speed."""
        self._tokens_logged, self._seconds_logged = state.tokens, state.seconds
        self._last_logged = time.monotonic()

    def step(self, report: StepReport, state: TrainingState, *, last: bool) -> None:
        """Records a step; writes a line if one is due, or when it is the `last` of its phase."""
        if not self._active:
            return
        if report.applied:
            self._reports.append(report)
        due = time.monotonic() - self._last_logged >= self._log_seconds
        if self._reports and (due or last):
            self._write(state, last)

    def fault(self, report: StepReport, bad: BadSamples, action: Action, state: TrainingState) -> str:
        """Writes a bad step and returns the sentence about it. `bad`: (rank, its samples) of each bad micro-batch;
        `action`: what the guard does about it."""
        assert report.fault is not None
        where = [{"rank": rank, "first": samples.start, "last": samples.stop - 1} for rank, samples in bad]
        step = state.step if report.applied else state.step + 1
        sentence = describe_fault(report, step, bad, state)
        if self._active:
            facts = {"kind": report.fault.kind, "action": action, "scale": report.loss_scale, "where": where}
            values = {
                "loss": repr(report.loss),
                "gradient_norm": repr(report.grad_norm),
            }  # JSON knows neither nan nor inf
            self._record(state, {"fault": facts | values})
            self.print_line(f"{sentence}: {_DONE[action]}")
        return sentence

    def slow(self, rank: SlowRank, state: TrainingState) -> None:
        """Writes that a rank is slow."""
        if self._active:
            self._record(state, {"slow": asdict(rank)})
            self.print_line(rank.sentence(state.step))

    def odd_replica(self, odd: OddReplica, hosts: Sequence[str], policy: str, state: TrainingState) -> str:
        """Writes that replicas differ, and returns the sentence about it."""
        sentence = odd.sentence(state.step, hosts)
        if self._active:
            self._record(state, {"replica": asdict(odd) | {"action": policy}})
            self.print_line(sentence)
        return sentence

    def rolled_back(self, checkpoint: Path | None, steps: int, state: TrainingState) -> None:
        """Records a rollback of `steps` steps to `checkpoint` (None: there was none); the next line leaves them out."""
        if checkpoint is None:
            self.print_line("no checkpoint to go back to yet: skipped")
            return
        del self._reports[max(len(self._reports) - steps, 0) :]
        if not self._reports:
            self.start(state)
        if self._active:
            self._record(state, {"rollback": {"checkpoint": checkpoint.name}})
            self.print_line(f"went back to {checkpoint}")

    def saved(self, stall: float, state: TrainingState) -> None:
        """Records a checkpoint, and for how many seconds training waited for it."""
        if self._active:
            self._record(state, {"checkpoint": {"stall_seconds": round(stall, 3)}})

    def copied(self, renewal: Renewal, state: TrainingState) -> None:
        """Records a copy in memory, or why there is none."""
        if self._active:
            self._record(state, {"copy": renewal.facts})
            if renewal.sentence is not None:
                self.print_line(renewal.sentence)

    def mirrored(self, news: Sequence[News], state: TrainingState) -> None:
        """Records what became of checkpoints on their way to the mirror."""
        for each in news:
            self._record(state, {"mirror": each.facts})
            if each.sentence is not None:
                self.print_line(each.sentence)

    def validation(self, result: ValidationResult, state: TrainingState, head: str) -> None:
        """Writes an evaluation; `head`: what predicted, `pmi` (the training-free head), `tied` or `trained`."""
        if not self._active:
            return
        self._record(state, {"validation": asdict(result) | {"head": head}})
        self._perplexity = result.perplexity
        found = {name: value for name, value in asdict(result).items() if isinstance(value, float)}
        self._boards.add("validation", found, state.step)
        most = "at most " if result.upper_bound else ""
        whose = "generator's " if result.detection else ""
        told = f"; {told_apart(asdict(result.detection))}" if result.detection else ""
        bits = "" if result.bits_per_byte is None else f", {most}{result.bits_per_byte:.3f} bits per byte"
        self.print_line(
            f"held out at step {state.step:,}: {whose}perplexity {most}{result.perplexity:,.1f}{bits}, "
            f"accuracy {result.accuracy:.1%} ({head} head){told}"
        )

    def tasks(self, results: Sequence[TaskResult], state: TrainingState) -> None:
        """Writes the results of tasks: value and standard error of each metric."""
        if not self._active:
            return
        scores = [(result.task, score) for result in results for score in result.scores]
        record: dict[str, dict[str, Any]] = {result.task: {} for result in results}
        for task, score in scores:
            record[task][score.metric] = {"value": score.value, "stderr": score.stderr}
        self._record(state, {"tasks": record})
        self._boards.add("tasks", {f"{task}/{score.metric}": score.value for task, score in scores}, state.step)
        sentence = ", ".join(f"{task} {score.metric} {score.value:.4g}" for task, score in scores)
        self.print_line(f"tasks at step {state.step:,}: {sentence}")

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
        scalars = self._scalars(state)
        self._record(state, scalars)
        self._boards.add("train", scalars, state.step)
        if time.monotonic() - self._last_printed >= self._print_seconds or last:
            self.print_line(progress_line(scalars, state, self._total_steps, self._perplexity))
            self._last_printed = time.monotonic()
        self._reports.clear()
        self.start(state)

    def _scalars(self, state: TrainingState) -> dict[str, float]:
        reports = self._reports
        seconds = max(state.seconds - self._seconds_logged, 1e-9)
        mean_loss = sum(r.loss for r in reports) / len(reports)
        candidates = sum(r.candidates for r in reports) / len(reports)
        speed = (state.tokens - (self._tokens_logged or 0)) / seconds
        scalars = {
            "loss": mean_loss,
            "learning_rate": reports[-1].learning_rate,
            "gradient_norm": sum(r.grad_norm for r in reports) / len(reports),
            "tokens_per_second": speed,
            "step_seconds": seconds / len(reports),
            "step_cpu_seconds": sum(r.cpu_seconds for r in reports) / len(reports),
            "candidates": candidates,
            "skipped_steps": state.skipped_steps,
        }
        if found := [r.detection for r in reports if r.detection is not None]:
            means = {name: sum(getattr(one, name) for one in found) / len(found) for name in asdict(found[0])}
            scalars |= {f"detection_{name}": value for name, value in means.items()}
            scalars["generator_loss"] = mean_loss - self._detection_weight * means["loss"]
        fetched = [r.rows_fetched for r in reports if r.rows_fetched is not None]
        if fetched:
            scalars["rows_fetched"] = sum(fetched) / len(fetched)
            scalars["rows_late"] = sum(r.rows_stale for r in reports) / len(reports)
        return scalars | (self.utilization.of(speed, candidates) if self.utilization else {})

    def _record(self, state: TrainingState, fields: Mapping[str, Any]) -> None:
        where = {"step": state.step, "tokens": state.tokens, "seconds": round(state.seconds, 3)}
        self._log.write(orjson.dumps(where | dict(fields)) + b"\n")
        self._log.flush()


def _open_log(path: Path) -> BinaryIO:
    """Opens the log for appending; removes a last line that a killed run left unfinished."""
    log = path.open("ab+")
    log.seek(0)
    log.truncate(log.read().rfind(b"\n") + 1)
    return log
