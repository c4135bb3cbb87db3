"""A runner whose runs take a second."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TextIO

from experiments.measures import Row
from experiments.runner import ExperimentRunner
from support.forked import run_script

TINY = [
    "model.num_layers=1",
    "model.hidden_size=16",
    "data.sequence_length=16",
    "batch.global_size=16",
    "training.evaluate_samples=4",
    "schedule.warmup_steps=1",
    "training.steps=2",
]


def run_logged(command: Sequence[str], log: TextIO, ranks: int = 1) -> int:
    assert ranks == 1
    done = run_script(*command)
    log.write(done.stdout + done.stderr)
    return done.returncode


def results(runner: ExperimentRunner, name: str) -> list[Row]:
    record: dict[str, list[Row]] = json.loads((runner.folder / f"{name}.json").read_text())
    return record["results"]
