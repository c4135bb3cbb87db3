"""Another vocabulary, in tiny."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.laboratory import Laboratory
from experiments.revocabulary import WAYS, compare_revocabulary, run_name
from megahead.config.loading import load_config
from megahead.report.read import read_metrics
from support.laboratory import TINY, results
from support.vocabularies import vocabulary


@pytest.mark.slow
def test_a_decoder_moves_to_two_vocabularies_and_each_way_is_told(
    laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {"LARGER": 400, "STEPS": 2, "STEPS_AFTER": 2, "EVERY": 1, "HELD_OUT": 20}.items():
        monkeypatch.setattr(f"experiments.revocabulary.{name}", value)
    other = vocabulary(tmp_path, "sentencepiece", 420).tokenizer.path
    settings = [part for part in TINY if "training.steps" not in part]
    compare_revocabulary(replace(laboratory, tokenizer=other, settings=settings), [])
    rows = results(laboratory, "revocabulary")
    assert [(row["vocabulary"], row["way"]) for row in rows] == [
        (name, way) for name in ("400 ids", "sentencepiece-420") for way in WAYS
    ]
    assert all(0 < row["at the end"] < 20 for row in rows)
    goal = read_metrics(laboratory.folder / "runs/base").validation[-1]["bits_per_byte"]
    for row in rows:
        run = read_metrics(laboratory.folder / "runs" / run_name(row["vocabulary"], row["way"]))
        back = [record["tokens"] for record in run.validation if record["bits_per_byte"] <= goal]
        assert row["tokens until back"] == (back[0] if back else None)
    assert (laboratory.folder / "revocabulary.png").stat().st_size > 5_000
    compare_revocabulary(replace(laboratory, tokenizer=other, settings=settings), ["headless-table"])
    assert [row["way"] for row in results(laboratory, "revocabulary")] == ["headless-table"] * 2


def test_large_sizes_name_runs_too() -> None:
    name = run_name("32,768 ids", "headless-table")
    assert load_config("configs/small-headless.yaml", [f"name={name}"]).name == "32768-ids-headless-table"
