"""A language of facts, in tiny."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from experiments.bottleneck import OBJECTIVES, compare_bottleneck, write_language
from experiments.laboratory import Laboratory
from megahead.data.indexed import IndexedDataset
from support.laboratory import results


def test_who_learns_a_language_of_facts(laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SIZES": (64,), "RATES": (1e-3, 1.6e-2), "STEPS": 4, "HELD_OUT": 3}.items():
        monkeypatch.setattr(f"experiments.bottleneck.{name}", value)
    compare_bottleneck(replace(laboratory, text=None, settings=("schedule.warmup_steps=1",)), [])
    tried = results(laboratory, "bottleneck-rates")
    best = results(laboratory, "bottleneck")
    assert [(row["objective"], row["rate"]) for row in tried] == [
        (objective, rate) for objective in OBJECTIVES for rate in (1e-3, 1.6e-2)
    ]
    knows = [(row["facts known"], -row["loss"]) for row in tried]
    assert [tried.index(row) for row in best] == [max(k, k + 1, key=knows.__getitem__) for k in (0, 2, 4)]
    assert all(0 < row["gradient_share"] <= 1 for row in best)
    assert (laboratory.folder / "bottleneck.png").stat().st_size > 5_000


def test_the_language_walks_along_cycles_of_a_permutation(tmp_path: Path) -> None:
    texts = IndexedDataset(write_language(tmp_path, 128) / "held-out")
    successor: dict[int, int] = {}
    for document in map(texts.document, range(100)):
        *symbols, end = document.tolist()
        assert end == 0
        assert len(symbols) == 124
        assert len(set(symbols)) == 25  # five laps
        for one, other in pairwise(symbols):
            assert successor.setdefault(one, other) == other != one
    assert len({*successor.values()}) == len(successor) == 125
    first_lap = IndexedDataset(tmp_path / "first-lap").document(0)
    assert len(set(first_lap.tolist())) == len(first_lap) == 25
