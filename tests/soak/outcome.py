"""The end of a soak: the run and its undisturbed twin reach the last step and are compared; what faults have cost.

The twin has as many ranks at every step as those had that counted in the end: then all bits must be the same.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megahead.checkpoints.reading import open_checkpoint
from megahead.report.read import read_metrics
from megahead.report.tables import to_markdown
from megahead.wording import format_duration, pluralize
from soak.faults import Progress
from soak.nodes import ROOT
from soak.sitting import LEAVE_SECONDS, Cluster, Sitting, SoakError

Line = Mapping[str, Any]
HOUR = 3600.0


@dataclass(frozen=True)
class Accounts:
    """Of all sittings."""

    seconds: float
    """Wall time in which faults came."""

    events: int
    faults: int
    steps: int
    """That were taken meanwhile, and counted in the end."""

    again: int
    """That were taken, lost, and taken again."""

    useful_seconds: float
    """Of the steps that counted, as logged: without checkpoints and copies."""

    sessions: int

    @property
    def effective(self) -> float:
        """Share of the wall time in which steps were computed that counted."""
        return self.useful_seconds / self.seconds


def account(run: Path, sittings: Sequence[Sitting], events: Sequence[Line]) -> Accounts:
    training = read_metrics(run).training
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    counted = [line for line in training if any(s.from_step < line["step"] <= s.to_step for s in sittings)]
    return Accounts(
        seconds=sum(sitting.seconds for sitting in sittings),
        events=len({line["event"] for line in events if "event" in line}),
        faults=sum(line.get("done") is not None for line in events),
        steps=len(counted),
        again=sum("loss" in record for record in records) - len(training),
        useful_seconds=sum(line["step_seconds"] for line in counted),
        sessions=sum("session" in record for record in records),
    )


def by_kind(events: Sequence[Line]) -> list[dict[str, Any]]:
    """A row a kind, of the events at which nothing else went wrong.

    `cost`: seconds from the fault until all nodes train and the run is further than before, less what the steps gained
    meanwhile usually take.
    """
    rows = []
    for kind in sorted({str(line["kind"]) for line in events if "kind" in line}):
        alone = [outcome for outcome in _outcomes(events) if outcome["kinds"] == [kind]]
        if alone:
            rows.append({"fault": kind, "times": len(alone), **_costs(alone)})
    return rows


def mean_cost(rows: Sequence[Line]) -> float:
    """Seconds that a fault of any kind costs, each kind counted once."""
    return statistics.fmean(row["cost, s"] for row in rows)


def share(cost: float, every: float) -> str:
    """The effective training time if a fault of that cost comes every so many seconds."""
    return f"{max(0.0, 1 - cost / every):.2%}"


def _costs(outcomes: Sequence[Line]) -> dict[str, Any]:
    costs = [outcome["cost"] for outcome in outcomes]
    mean = statistics.fmean(costs)
    again = statistics.fmean(outcome["again"] for outcome in outcomes)
    return {
        "cost, s": round(mean, 1),
        "most": round(max(costs), 1),
        "steps again": round(again, 1),
        "one an hour": share(mean, HOUR),
    }


def _outcomes(events: Sequence[Line]) -> list[dict[str, Any]]:
    """Events that the run has recovered from, with the kinds of their faults that found something to happen to."""
    kinds: dict[int, list[str]] = {}
    for line in events:
        if line.get("done") is not None:
            kinds.setdefault(line["event"], []).append(line["kind"])
    return [{**line, "kinds": kinds.get(line["event"], [])} for line in events if "recovered" in line]


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
    settings = {"output_dir": run, "training.steps": stretch.until, "training.replicate_every": "null"}
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


def write_page(
    folder: Path, accounts: Accounts, found: Comparison, events: Sequence[Line], settings: dict[str, Any]
) -> str:
    """soak.json and soak.md in `folder`; what the second says."""
    kinds = by_kind(events)
    exact = {"settings": settings, "accounts": asdict(accounts), "effective": accounts.effective}
    exact |= {"twin": asdict(found) | {"step_seconds": twin_step_seconds(folder)}, "kinds": kinds}
    (folder / "soak.json").write_text(json.dumps(exact, indent=1) + "\n", encoding="utf-8")
    page = "\n".join([*_lines(accounts, found, settings), *_computed(kinds), "", to_markdown(kinds)])
    (folder / "soak.md").write_text(page + "\n", encoding="utf-8")
    return page


def twin_step_seconds(folder: Path) -> float:
    """Median, without the soak's pauses."""
    seconds = sorted(line["step_seconds"] for line in read_metrics(folder / "twin").training)
    return float(seconds[len(seconds) // 2])


def _lines(accounts: Accounts, found: Comparison, settings: dict[str, Any]) -> list[str]:
    every = accounts.seconds / max(accounts.events, 1)
    rows = "the same rows read" if found.same_rows else "OTHER ROWS READ"
    return [
        f"{format_duration(accounts.seconds)} on {settings['hosts']} nodes ({settings['ranks']} ranks), seed "
        f"{settings['seed']}: {pluralize(accounts.faults, 'fault')} in {pluralize(accounts.events, 'event')}, one "
        f"every {every:.0f} s; {pluralize(accounts.sessions, 'session')}.",
        f"After {found.step:,} steps and against the undisturbed twin: {_differences(found)}; {rows}.",
        f"{accounts.steps:,} steps counted meanwhile, {accounts.again:,} were lost and done again. Effective training "
        f"time (seconds of the steps that counted, as logged, over wall time): {accounts.effective:.1%}.",
    ]


def _computed(kinds: Sequence[Line]) -> list[str]:
    if not kinds:
        return []
    cost = mean_cost(kinds)
    return [
        f"A fault costs {cost:.0f} s (mean over kinds): {share(cost, HOUR)} at one an hour, {share(cost, 120)} at one "
        "every two minutes."
    ]


def _differences(found: Comparison) -> str:
    if found.same_bits:
        return "the same bits in weights and optimizer"
    return f"weights differ by {found.largest_difference:.1e} at most, losses by {found.largest_loss_difference:.1e}"
