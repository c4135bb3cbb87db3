"""Groups, vocabularies and precisions, in tiny."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from experiments.figures import compare_latency, compare_negatives, compare_precision
from experiments.runner import GRIDS, ExperimentRunner
from support.long import long
from support.runner import TINY, results


def test_groups_in_batches(runner: ExperimentRunner) -> None:
    compare_negatives(replace(runner, settings=[*TINY, "model.num_heads=2"]), ["batch-16-group-1"])
    (row,) = json.loads((runner.folder / "negatives.json").read_text())["results"]
    assert (row["batch"], row["group"]) == (16, 1)
    assert 1 < row["candidates"] <= 16


@pytest.mark.parametrize("batches", [[1], long([1, 2])], ids=str)
def test_steps_are_timed_once_for_each_batch(
    runner: ExperimentRunner, monkeypatch: pytest.MonkeyPatch, batches: list[int]
) -> None:
    monkeypatch.setattr("experiments.figures.SHAPES", (("bert-tiny", 16),))
    monkeypatch.setattr("experiments.figures.TOKENS", {"bert-tiny": (8, *(16 * batch for batch in batches))})
    compare_latency(runner, [])
    rows = results(runner, "latency")
    assert [(row["batch"], row["objective"]) for row in rows] == [
        (batch, objective) for batch in batches for objective in ("headless", "vanilla")
    ]
    assert all(row["times headless"] == row["ms"] / rows[k // 2 * 2]["ms"] for k, row in enumerate(rows))
    assert all(20 < row["peak MB"] < 2_000 for row in rows)  # 30,522 x 128 weights, gradients and moments: 62 MB
    compare_latency(runner, [])
    assert results(runner, "latency") == rows


def test_precisions_are_held_against_seeds(runner: ExperimentRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GRIDS["precision"], "vocabulary", 320)
    shape = ["model.num_heads=2", "batch.micro_size=8"]
    compare_precision(replace(runner, settings=[*TINY, *shape]), [])
    rows = results(runner, "precision")
    loss = {(row["precision"], row["seed"]): row["loss"] for row in rows}
    assert [*loss] == [(precision, seed) for seed in (0, 1) for precision in ("fp32", "bf16")]
    assert 0 < abs(loss["fp32", 0] - loss["bf16", 0]) < 1e-2
    assert [row["seeds"] for row in results(runner, "precision-ends")] == [2, 2]
