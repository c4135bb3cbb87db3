"""Costs are those of two runs beside each other, never of one alone."""

from __future__ import annotations

import json

import pytest

from experiments.laboratory import Laboratory
from experiments.measures import relative_cost
from megahead.report.read import RunMetrics
from megahead.run_folder import RunFolder

STEPS = 12


def logged(name: str, beside: float, alone: float, until: int) -> RunMetrics:
    """A run whose steps cost `beside` another one until that has ended at second `until`, and `alone` then; its first
    is the dearest."""
    lines, now = [], 0.0
    for step in range(1, STEPS + 1):
        price = 50.0 if step == 1 else beside if now < until else alone
        now += price
        lines.append({"step": step, "tokens": 10 * step, "seconds": now, "step_cpu_seconds": price})
    return RunMetrics(name, lines, ())


def test_costs_are_of_the_time_in_which_both_run(laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    cheap_ends = 50 + 11 * 3
    runs = {"cheap": logged("cheap", 3, 3, 999), "dear": logged("dear", 9, 6, cheap_ends)}
    assert relative_cost(laboratory, lambda _, name: runs[name], "dear", "cheap") == 3
    assert relative_cost(laboratory, lambda _, name: runs[name], "cheap", "dear") == 1 / 3


def test_a_pair_of_which_one_was_stopped_begins_anew(laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = {"ours": 3.0, "theirs": 2.0}
    monkeypatch.setattr("experiments.measures._cost", lambda run, _: costs[run.name])
    was_there: dict[str, bool] = {}

    def train(quiet: Laboratory, name: str) -> RunMetrics:
        run = RunFolder(quiet.folder / name)
        was_there[name] = run.path.exists()
        end(run, "finished")
        return logged(name, 1, 1, 0)

    def end(run: RunFolder, ending: str) -> None:
        run.path.mkdir(parents=True, exist_ok=True)
        run.ending.write_text(json.dumps({"ending": ending}))

    end(RunFolder(laboratory.folder / "ours"), "stopped")
    end(RunFolder(laboratory.folder / "theirs"), "finished")
    for there in (False, True):
        assert relative_cost(laboratory, train, "ours", "theirs") == 1.5
        assert was_there == {"ours": there, "theirs": there}
