"""Precisions beside seeds, in tiny."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experiments.laboratory import Laboratory
from experiments.precision import compare_precision
from support.laboratory import TINY, results


def test_precisions_are_held_against_seeds(laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.precision.VOCABULARY", 320)
    shape = ["model.num_heads=2", "batch.micro_size=8", "training.evaluate_every=1"]
    compare_precision(replace(laboratory, settings=[*TINY, *shape]), [])
    rows = results(laboratory, "precision")
    assert [(row["precision"], row["seed"], row["step"]) for row in rows] == [
        (precision, seed, step) for seed in (0, 1) for precision in ("fp32", "bf16") for step in (1, 2)
    ]
    apart = {row["differ in"]: row for row in results(laboratory, "precision-apart")}
    assert apart.keys() == {"precision", "seed", "precision and seed"}
    assert 0 < apart["precision"]["mean apart"] < apart["seed"]["mean apart"]
    assert [row["seeds"] for row in results(laboratory, "precision-ends")] == [2, 2]
