"""What a soak's faults have cost."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.soak.journal import Sitting
from megahead.report.read import read_metrics

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
