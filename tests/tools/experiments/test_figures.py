"""Decoders along training, in tiny."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.figures import compare_decoders
from experiments.runner import GRIDS, ExperimentRunner
from megahead.report.read import read_metrics
from support.runner import results


@pytest.mark.long
@pytest.mark.slow
def test_decoders_along_training_and_with_a_trained_head(
    runner: ExperimentRunner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(GRIDS["decoders"]["axes"]["seed"], "values", [0])
    monkeypatch.setitem(GRIDS["decoders"], "settings", ["training.steps=2", "training.checkpoint_every=1"])
    sizes = {"HEAD_STEPS": 2, "LONG_HEAD_STEPS": 2, "HEAD_POINTS": 2}
    for name, value in sizes.items():
        monkeypatch.setattr(f"experiments.figures.{name}", value)
    monkeypatch.setattr("experiments.figures.FINAL_TASKS", "lambada_openai")
    (tmp_path / "lambada").mkdir()
    texts = ["The sea is as deep as the sea", "A dog is not a cat, nor is a cat a dog"]
    (tmp_path / "lambada/lambada_test.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    compare_decoders(replace(runner, tasks_data=tmp_path), [])
    rows = results(runner, "decoders")
    assert [(row["objective"], row["head"], row["step"]) for row in rows] == [
        *(("headless", head, step) for step in (1, 2) for head in ("tied", "pmi")),
        *(("vanilla", "trained", step) for step in (1, 2)),
        *(("headless", "trained", step) for step in (1, 2)),
    ]
    assert rows[-1]["tokens"] == rows[3]["tokens"] + 2 * 16 * 16  # those of the body, and of the head
    (pmi,) = (row for row in rows if row["head"] == "pmi" and row["step"] == 2)
    held_out = read_metrics(runner.folder / "headless-0").validation[-1]["perplexity"]
    assert pmi["perplexity"] == pytest.approx(held_out)
    assert (runner.folder / "decoders.png").stat().st_size > 5_000
    ends = results(runner, "decoders-ends")
    assert [(row["objective"], row["head"], row["seeds"]) for row in ends] == [
        *(("headless", head, 1) for head in ("tied", "pmi")),
        ("vanilla", "trained", 1),
        ("headless", "trained", 1),
    ]
    assert ends[1]["perplexity"] == pmi["perplexity"]
    scored = results(runner, "decoders-lambada")
    assert [(row["objective"], row["head"]) for row in scored] == [
        *(("headless", "pmi"),) * 2,
        *(("vanilla", "trained"),) * 2,
        *(("headless", "trained"),) * 2,
    ]
    assert scored[-1]["tokens"] == rows[-1]["tokens"]
    assert all(row["perplexity"] > 1 and row["± acc"] is not None for row in scored)
    perplexity, _ = results(runner, "decoders-tasks")
    models = ["headless-0", "head-0", "vanilla-0", "random-0"]
    assert list(perplexity) == ["task", "metric", *models]
    assert perplexity["head-0"].startswith(f"{scored[-1]['perplexity']:.4g} ± ")
