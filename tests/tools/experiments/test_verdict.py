"""The long comparison, in tiny: who runs how long, and what is told along the way."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.laboratory import Laboratory
from experiments.measures import Row
from experiments.verdict import Race, compare_verdict
from support.laboratory import results

TINY = [
    *("model.num_layers=1", "model.hidden_size=16", "model.num_heads=2", "data.sequence_length=16"),
    *("batch.global_size=8", "batch.micro_size=4", "training.evaluate_samples=4"),
]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cloze = tmp_path / "passages.jsonl"
    cloze.write_text(
        "".join(json.dumps({"text": f"the cat saw the rat and the {word}"}) + "\n" for word in ("cat", "rat"))
    )
    settings = {
        "VOCABULARY": 320,
        "STEPS": {"short": 12},
        "SWITCHES": {"short": (0.5,)},
        "SPEED_STEPS": 1,
        "POINTS": 1,
        "SEEDS": {"short": (0,)},
    }
    for name, value in settings.items():
        monkeypatch.setattr(f"experiments.verdict.{name}", value)
    monkeypatch.setattr("experiments.verdict._cloze", lambda *_: cloze)


def test_all_runs_of_a_race_take_the_same_time(laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.verdict.speed", lambda run: {"headless": 300, "vanilla": 100}[run])
    monkeypatch.setattr(Race, "_train", lambda self, name, steps, settings: name.removeprefix("speed "))
    ran: dict[str, tuple[int, tuple[str, ...]]] = {}

    def noted(self: Race, name: str, steps: int, settings: tuple[str, ...]) -> list[Row]:
        ran[name] = steps, tuple(settings)
        return []

    monkeypatch.setattr(Race, "_run", noted)
    Race(laboratory, "short", 0).points()
    assert {name: steps for name, (steps, _) in ran.items()} == {
        "headless": 12,
        "vanilla": 4,
        "vanilla for the last 50%": 6 + 2,
        "vanilla, equal tokens": 12,
    }
    assert "objective.schedule.vanilla_share=0.25" in ran["vanilla for the last 50%"][1]


def test_every_run_is_scored_along_the_way(laboratory: Laboratory) -> None:
    compare_verdict(replace(laboratory, settings=TINY), ["short"])
    points = results(laboratory, "verdict-short")
    assert {row["run"] for row in points} >= {"headless", "vanilla", "vanilla for the last 50%"}
    assert all(row["cloze"] is not None for row in points)
    ends = results(laboratory, "verdict-short-ends")
    assert [row["seeds"] for row in ends if row["run"] == "headless"] == [1]
    assert all(row["bits per byte"] > 0 for row in ends)
