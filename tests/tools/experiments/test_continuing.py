"""Vanilla models of both shapes go on in another vocabulary, each way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experiments.continuing import compare_continuing
from experiments.runner import GRIDS, ExperimentRunner
from support.runner import TINY, results


@pytest.mark.long
@pytest.mark.slow
def test_both_shapes_continue_each_way(runner: ExperimentRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"SMALLER": 320, "LARGER": 400, "BASE_STEPS": 2, "MINUTES": 1e-9, "HELD_OUT": 20}
    for name, value in sizes.items():
        monkeypatch.setattr(f"experiments.continuing.{name}", value)
    monkeypatch.setattr("experiments.runner.PROBE_STEPS", 3)
    settings = [*(part for part in TINY if "training.steps" not in part), "batch.micro_size=4"]
    compare_continuing(replace(runner, settings=settings), [])
    rows = results(runner, "continuing")
    grid = GRIDS["continuing"]
    assert [(row["model"], row["trained"]) for row in rows] == [
        (shape, way) for shape in grid["shapes"] for way in ("before", *grid["ways"])
    ]
    assert all(0 < row["bits per byte"] < 20 and row["steps"] == 2 for row in rows)
