"""Models go on in another vocabulary, each way, in tiny."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.continuing import compare_continuing, compare_revocabulary
from experiments.runner import GRIDS, ExperimentRunner, run_name
from megahead.report.read import read_metrics
from support.runner import TINY, results
from support.vocabularies import vocabulary


@pytest.mark.long
@pytest.mark.slow
def test_both_shapes_continue_each_way(runner: ExperimentRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"IDS_BEFORE": 320, "IDS_AFTER": 400, "BASE_STEPS": 2, "MINUTES": 1e-9, "HELD_OUT": 20}
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


@pytest.mark.long
@pytest.mark.slow
def test_a_decoder_moves_to_two_vocabularies_and_each_way_is_told(
    runner: ExperimentRunner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    smaller = {"DECODER_IDS": 400, "FIRST_STEPS": 2, "STEPS_AFTER": 2, "EVALUATE_EVERY": 1, "DECODER_HELD_OUT": 20}
    for name, value in smaller.items():
        monkeypatch.setattr(f"experiments.continuing.{name}", value)
    other = vocabulary(tmp_path, "sentencepiece", 420).tokenizer.path
    settings = [part for part in TINY if "training.steps" not in part]
    compare_revocabulary(replace(runner, tokenizer=other, settings=settings), [])
    rows = results(runner, "revocabulary")
    assert [(row["vocabulary"], row["way"]) for row in rows] == [
        (name, way) for name in ("400 ids", "sentencepiece-420") for way in GRIDS["revocabulary"]["axes"]["way"]
    ]
    assert all(0 < row["at the end"] < 20 for row in rows)
    goal = read_metrics(runner.folder / "runs/base").validation[-1]["bits_per_byte"]
    for row in rows:
        run = read_metrics(runner.folder / "runs" / run_name(f"{row['vocabulary']}-{row['way']}"))
        back = [record["tokens"] for record in run.validation if record["bits_per_byte"] <= goal]
        assert row["tokens until back"] == (back[0] if back else None)
    assert (runner.folder / "revocabulary.png").stat().st_size > 5_000
    compare_revocabulary(replace(runner, tokenizer=other, settings=settings), ["headless-table"])
    assert [row["way"] for row in results(runner, "revocabulary")] == ["headless-table"] * 2
