"""The experiments' laboratory: runs of the normal command, made once, reused, and recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console
from small_checkpoint import save_tokenizer
from small_run import write_text

from megahead.errors import UserError
from megahead.report import read_metrics
from paper.laboratory import Laboratory
from paper.variants import compare_variants

TINY = [
    "model.num_layers=1",
    "model.hidden_size=16",
    "model.vocab_size=60",
    "data.sequence_length=16",
    "batch.global_size=16",
    "training.evaluate_samples=4",
    "schedule.warmup_steps=1",
]


@pytest.fixture
def laboratory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Laboratory:
    monkeypatch.chdir(Path(__file__).parents[2])
    write_text(tmp_path)
    save_tokenizer(tmp_path / "tokenizer.json")
    data = {"train": tmp_path / "text", "validation": tmp_path / "text", "tokenizer": tmp_path / "tokenizer.json"}
    settings = [*TINY, *(f"data.{name}={path}" for name, path in data.items()), "training.steps=2"]
    (tmp_path / "lab").mkdir()
    return Laboratory(tmp_path / "lab", settings, Console(quiet=True))


def test_a_variant_is_trained_once_scored_with_both_heads_and_recorded(laboratory: Laboratory) -> None:
    compare_variants(laboratory, ["paper, group 4"])
    record = json.loads((laboratory.folder / "variants.json").read_text())
    (row,) = record["results"]
    run, head = (laboratory.folder / name for name in ("paper-group-4", "paper-group-4-head"))
    assert row["run"] == "paper, group 4"
    assert row["own head: perplexity"] == read_metrics(run).validation[-1]["perplexity"]
    assert row["trained head: perplexity"] == read_metrics(head).validation[-1]["perplexity"]
    assert record["settings"] == list(laboratory.settings)
    assert "| paper, group 4 |" in (laboratory.folder / "variants.md").read_text()

    logs = [(folder / "log.txt").read_text() for folder in (run, head)]
    compare_variants(laboratory, ["paper, group 4"])
    assert [(folder / "log.txt").read_text() for folder in (run, head)] == logs  # neither was started again
    assert json.loads((laboratory.folder / "variants.json").read_text())["results"] == [row]


def test_a_run_that_fails_is_told_with_the_end_of_its_log(laboratory: Laboratory) -> None:
    with pytest.raises(UserError, match=r"(?s)broken must train to its end, but failed.*init\.from_checkpoint"):
        laboratory.train("small-head", "broken", f"init.from_checkpoint={laboratory.folder / 'nowhere'}")
