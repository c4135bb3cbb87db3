"""The end of a soak: the run reaches its last step undisturbed, its twin goes all the way so, and both are compared.

The twin has as many ranks at every step as those had that counted in the end: then all bits must be the same.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.soak.cluster import LEAVE_SECONDS, Cluster, SoakError
from benchmarks.soak.nodes import ROOT
from benchmarks.soak.progress import Progress
from megahead.checkpoints.reading import open_checkpoint
from megahead.report.read import read_metrics

QUIET_SECONDS = 300.0
"""By when the next step must come, while nothing disturbs."""

_POLL_SECONDS = 0.5


def finish(cluster: Cluster, run: Path) -> bool:
    """Lets it train to its last step; False if someone wants to stop before."""
    cluster.start()
    weeks = 1e6
    if not cluster.until(lambda: finished(run), weeks, "the run's last step", QUIET_SECONDS):
        cluster.stop()
        return False
    for node in cluster.stage.nodes:
        node.away = True
    return cluster.until(lambda: not any(node.runs() for node in cluster.stage.nodes), LEAVE_SECONDS, "the end")


def finished(run: Path) -> bool:
    ending = run / "ending.json"
    return ending.exists() and json.loads(ending.read_text(encoding="utf-8"))["ending"] == "finished"


@dataclass(frozen=True)
class Stretch:
    """Steps of a run that as many ranks took, up to `until`."""

    until: int
    ranks: int


def stretches(metrics: Path) -> list[Stretch]:
    """By which a run came to its end, those left out that a later session did again."""
    begun: list[tuple[int, int]] = []
    last = 0
    for line in metrics.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        last = record["step"]
        if "session" in record:
            begun = [each for each in begun if each[0] < last]
            if not begun or begun[-1][1] != record["session"]["mesh"]["data"]:
                begun.append((last, record["session"]["mesh"]["data"]))
    ends = [*(step for step, _ in begun[1:]), last]
    return [Stretch(end, ranks) for end, (_, ranks) in zip(ends, begun, strict=True)]


def train_twin(config: Path, run: Path, log: Path, course: Sequence[Stretch], stopping: Callable[[], bool]) -> bool:
    """The same run on as many ranks of this machine at every step, without copies and pauses; False if someone wants to
    stop before its end, from where it then goes on."""
    progress = Progress(run / "metrics.jsonl")
    for stretch in course:
        progress.read()
        there = finished(run) and progress.step >= stretch.until
        if not there and not _train(config, run, log, stretch, progress, stopping):
            return False
    return True


def _train(
    config: Path, run: Path, log: Path, stretch: Stretch, progress: Progress, stopping: Callable[[], bool]
) -> bool:
    settings = {"output_dir": run, "training.steps": stretch.until, "training.copy_every": "null"}
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc_per_node", str(stretch.ranks), "launch/pretrain.py", "--config", str(config), *words]
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with log.open("ab") as said:
        launched = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=said, stderr=said)
    try:
        return _wait(launched, progress, run, stopping)
    finally:
        launched.send_signal(signal.SIGTERM)
        try:
            launched.wait(LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            launched.kill()


def _wait(launched: subprocess.Popen[bytes], progress: Progress, run: Path, stopping: Callable[[], bool]) -> bool:
    heard, lines = time.monotonic(), progress.lines
    while launched.poll() is None:
        if stopping():
            return False
        progress.read()
        if progress.lines > lines:
            heard, lines = time.monotonic(), progress.lines
        if time.monotonic() > heard + QUIET_SECONDS:
            raise SoakError(f"a step of the twin must come within {QUIET_SECONDS:g} s, but does not.")
        time.sleep(_POLL_SECONDS)
    if launched.returncode or not finished(run):
        raise SoakError(f"the twin must reach its last step, but ended with {launched.returncode}.")
    return True


@dataclass(frozen=True)
class Comparison:
    """Of a run and its twin, at their last step."""

    step: int
    same_bits: bool
    """Of all weights and the optimizer's state."""

    largest_difference: float
    """Between weights."""

    largest_loss_difference: float
    """Between losses of one step."""

    same_rows: bool
    """Whether both have read as many samples and tokens."""


def compare(run: Path, twin: Path) -> Comparison:
    """SoakError where the run's log lacks a step of its twin's."""
    ours, theirs = open_checkpoint(run), open_checkpoint(twin)
    tensors = {name: (ours.read(name), theirs.read(name)) for name in theirs.names() if not name.startswith("state/")}
    weights = [pair for name, pair in tensors.items() if name.startswith("weight/")]
    losses = [{line["step"]: line["loss"] for line in read_metrics(folder).training} for folder in (run, twin)]
    if losses[0].keys() != losses[1].keys():
        missing = sorted(losses[0].keys() ^ losses[1].keys())
        raise SoakError(
            f"the logs must have the same steps, but only one has step {missing[0]} ({len(missing)} in all)."
        )
    counters = [{name: each.state_value(name, int) for name in ("samples", "tokens")} for each in (ours, theirs)]
    return Comparison(
        step=ours.step,
        same_bits=ours.step == theirs.step and all(torch.equal(mine, other) for mine, other in tensors.values()),
        largest_difference=max(float((mine - other).abs().max()) for mine, other in weights),
        largest_loss_difference=max(abs(losses[0][step] - losses[1][step]) for step in losses[0]),
        same_rows=ours.step == theirs.step and counters[0] == counters[1],
    )
