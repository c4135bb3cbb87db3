"""Shapes beside each other, in tiny."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experiments.laboratory import Laboratory
from experiments.shapes import compare_shapes
from megahead.report.read import read_metrics, read_runs
from support.laboratory import TINY, results


@pytest.mark.slow
def test_shapes_are_swept_and_the_best_rate_gets_the_other_seeds(
    laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"VOCABULARY": 320, "RATES": (1e-3, 1e-2), "ENCODER_STEPS": 10, "ENCODER_POINTS": 2}
    for name, value in small.items():
        monkeypatch.setattr(f"experiments.shapes.{name}", value)
    sizes = [part for part in TINY if not part.startswith("training.steps")]
    shape = ["model.num_heads=2", "batch.micro_size=8", "training.evaluate_every=1"]
    compare_shapes(replace(laboratory, settings=[*TINY, *shape]), ["pythia", "llama"])
    rows = {(row["shape"], row["rate"]): row for row in results(laboratory, "shapes")}
    assert rows.keys() == {(shape, rate) for shape in ("pythia", "llama") for rate in (1e-3, 1e-2)}
    for shape in ("pythia", "llama"):
        first = {rate: read_metrics(laboratory.folder / f"{shape}-{rate:g}-0").validation[-1] for rate in (1e-3, 1e-2)}
        best = min(first, key=lambda rate: first[rate]["perplexity"])
        assert [rows[shape, rate]["seeds"] for rate in (1e-3, 1e-2)] == [1 + (rate == best) for rate in (1e-3, 1e-2)]
    shape = ["model.num_heads=2", "model.intermediate_size=32", "batch.micro_size=8"]
    compare_shapes(replace(laboratory, settings=[*sizes, *shape]), ["bert", "modernbert"])
    along = [(row["shape"], row["step"]) for row in results(laboratory, "shapes-encoders")]
    assert along == [(shape, step) for shape in ("bert", "modernbert") for step in (5, 10)]
    families = {run.name: run.config["model"]["family"] for run in read_runs([laboratory.folder / "bert"])}
    assert families == {"bert": "bert"}
