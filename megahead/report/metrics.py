"""Reads the metrics that training logged: `RUN/metrics.jsonl`, one JSON object per line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megahead.errors import UserError
from megahead.run_folder import RunFolder

Record = Mapping[str, Any]

_RESTARTS = {"session", "rollback"}
"""Records after which a run continues from an earlier step than it had reached."""

_EVENTS = {*_RESTARTS, "fault", "slow", "replica", "copy", "mirror"}


@dataclass(frozen=True)
class RunMetrics:
    """One run's log: training lines and evaluations, each in the order of their steps."""

    name: str
    training: Sequence[Record]
    """{"step", "tokens", "seconds", "loss", "learning_rate", "gradient_norm", "tokens_per_second", ...}"""

    validation: Sequence[Record]
    """{"step", "tokens", "seconds", "perplexity", "bits_per_byte", "accuracy", "loss", "upper_bound"}; the last (not in
    older logs): whether they are upper bounds, of masked diffusion"""

    tasks: Sequence[Record] = ()
    """{"step", "tokens", "seconds", "tasks": {task: {metric: {"value", "stderr"}}}}, where lm-eval's tasks were run"""

    events: Sequence[Record] = ()
    """{"step", "tokens", "seconds", "session": {...}} where a session began, {..., "fault": {...}} where a step went
    wrong, {..., "rollback": {...}} where it went back, {..., "slow": {...}} where a rank was, {..., "replica": {...}}
    where weights differed between ranks, {..., "copy": {...}} where one in memory was due, {..., "mirror": {...}} where
    a checkpoint was sent there, or could not be; as they happened, those that a run went through again included
    """


def read_metrics(run: Path) -> RunMetrics:
    """The metrics of a run folder (or of a metrics.jsonl itself).

    Left out are a last line cut short by a killed run, and what a later session or a rollback abandoned; of two
    lines for one step the later counts. Raises UserError when there is no log, or when another line is broken.
    """
    path = run if run.suffix == ".jsonl" else RunFolder(run).metrics
    training: dict[int, Record] = {}
    validation: dict[int, Record] = {}
    tasks: dict[int, Record] = {}
    events: list[Record] = []
    for record in _records(path):
        step = record["step"]
        if _RESTARTS & record.keys():
            past = record.get("session", {}).get("continues", step)
            training, validation, tasks = (_up_to(past, lines) for lines in (training, validation, tasks))
        if "validation" in record:
            where = {key: record[key] for key in ("step", "tokens", "seconds")}
            validation[step] = where | record["validation"]
        elif "tasks" in record:
            tasks[step] = record
        elif "loss" in record:
            training[step] = record
        elif _EVENTS & record.keys():
            events.append(record)
    if not training and not validation:
        raise UserError(f"{path} must hold metrics of a run, but holds no line yet; try again after the first step.")
    name = path.parent.name
    if name in {"", ".."}:
        name = path.parent.resolve().name
    return RunMetrics(name, _in_order(training), _in_order(validation), _in_order(tasks), events)


def read_all_metrics(runs: Sequence[Path]) -> list[RunMetrics]:
    """Those of several runs; runs that share a name are named by their paths."""
    found = [read_metrics(run) for run in runs]
    names = [metrics.name for metrics in found]
    return [
        replace(metrics, name=str(run)) if names.count(metrics.name) > 1 else metrics
        for run, metrics in zip(runs, found, strict=True)
    ]


def _records(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise UserError(
            f"{path} must be the metrics of a run, but cannot be read ({error.strerror}); "
            "name a run folder such as runs/NAME."
        ) from None
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            record["step"], record["tokens"], record["seconds"]
        except (ValueError, KeyError, TypeError):
            if number == len(lines):  # whole lines end in a line break: this one was cut short
                break
            raise UserError(
                f"{path} must hold a JSON object with step, tokens and seconds a line, but line {number} is not."
            ) from None
        records.append(record)
    return records


def _up_to(step: int, by_step: Mapping[int, Record]) -> dict[int, Record]:
    return {at: record for at, record in by_step.items() if at <= step}


def _in_order(by_step: Mapping[int, Record]) -> list[Record]:
    return [by_step[step] for step in sorted(by_step)]
