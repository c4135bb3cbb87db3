"""Groups, vocabularies and step times, in tiny."""

from __future__ import annotations

import json

import pytest

from experiments.laboratory import Laboratory
from experiments.latency import compare_latency
from experiments.negatives import compare_negatives
from experiments.vocabularies import compare_vocabularies
from support.laboratory import results


def test_groups_in_batches_and_pairs_of_vocabularies(laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch) -> None:
    compare_negatives(laboratory, ["batch-16-group-1"])
    (row,) = json.loads((laboratory.folder / "negatives.json").read_text())["results"]
    assert (row["batch"], row["group"]) == (16, 1)
    assert 1 < row["candidates"] <= 16
    monkeypatch.setattr("experiments.vocabularies.SIZES", (300,))
    compare_vocabularies(laboratory, [])
    headless, vanilla = json.loads((laboratory.folder / "vocabularies.json").read_text())["results"]
    assert (headless["objective"], vanilla["objective"]) == ("headless", "vanilla")
    assert headless["vocabulary"] == vanilla["vocabulary"] == 300
    assert headless["headless is faster"] == headless["tokens/s"] / vanilla["tokens/s"]
    assert 0 < headless["bits per byte"] < 20


def test_steps_are_timed_once_for_each_batch(laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.latency.SHAPES", (("bert-tiny", 16),))
    monkeypatch.setattr("experiments.latency.TOKENS", {"bert-tiny": (8, 16, 32)})
    compare_latency(laboratory, [])
    rows = results(laboratory, "latency")
    assert [(row["batch"], row["objective"]) for row in rows] == [
        (batch, objective) for batch in (1, 2) for objective in ("headless", "vanilla")
    ]
    assert all(row["times headless"] == row["ms"] / rows[k // 2 * 2]["ms"] for k, row in enumerate(rows))
    assert all(20 < row["peak MB"] < 2_000 for row in rows)  # 30,522 x 128 weights, gradients and moments: 62 MB
    compare_latency(laboratory, [])
    assert results(laboratory, "latency") == rows
