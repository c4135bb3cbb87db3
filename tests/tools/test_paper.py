"""The experiments' laboratory: runs of the normal command, made once, reused, and recorded."""

from __future__ import annotations

import json
import os
import random
import runpy
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import numpy as np
import pytest
from rich.console import Console

from megahead.data import IndexedDataset
from megahead.errors import UserError
from megahead.report import read_metrics
from paper.decoders import compare_decoders
from paper.encoders import compare_encoders
from paper.laboratory import ROOT, Laboratory
from paper.negatives import compare_negatives
from paper.variants import compare_variants
from paper.vocabularies import compare_vocabularies

TINY = [
    "model.num_layers=1",
    "model.hidden_size=16",
    "data.sequence_length=16",
    "batch.global_size=16",
    "training.evaluate_samples=4",
    "schedule.warmup_steps=1",
    "training.steps=2",
]


def forked(command: Sequence[str], output: TextIO) -> int:
    """What a Python command does, in a process that has all modules already."""
    child = os.fork()
    if child == 0:
        os.chdir(ROOT)
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
        sys.argv, sys.stdout, sys.stderr = list(command), os.fdopen(1, "w"), os.fdopen(2, "w")
        code = 1
        try:
            runpy.run_path(command[0], run_name="__main__")
            code = 0
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 0
        finally:
            sys.stdout.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture
def laboratory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Laboratory:
    monkeypatch.chdir(ROOT)
    chance = random.Random(0)
    words = ["".join(chance.choices("aeioulnrst", k=chance.randrange(2, 9))) for _ in range(300)]
    texts = [" ".join(chance.choices(words, k=60)) for _ in range(400)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "lab").mkdir()
    monkeypatch.setattr("paper.laboratory.run_python", forked)
    return Laboratory(tmp_path / "lab", tmp_path / "text.jsonl", TINY, Console(quiet=True), vocabulary=320)


def test_a_variant_is_trained_once_scored_with_both_heads_and_recorded(laboratory: Laboratory) -> None:
    compare_variants(laboratory, ["paper, group 4"])
    record = json.loads((laboratory.folder / "variants.json").read_text())
    (row,) = record["results"]
    run, head = (laboratory.folder / name for name in ("paper-group-4", "paper-group-4-head"))
    assert row["run"] == "paper, group 4"
    assert row["own head: perplexity"] == read_metrics(run).validation[-1]["perplexity"]
    assert row["trained head: perplexity"] == read_metrics(head).validation[-1]["perplexity"]
    assert record["settings"] == TINY
    assert record["runs"]["paper-group-4"]["tokens"] == 2 * 16 * 16
    assert record["runs"]["paper-group-4-head"]["config"]["objective"]["name"] == "vanilla"
    assert "| paper, group 4 |" in (laboratory.folder / "variants.md").read_text()

    logs = [(folder / "log.txt").read_text() for folder in (run, head)]
    compare_variants(laboratory, ["paper, group 4"])
    assert [(folder / "log.txt").read_text() for folder in (run, head)] == logs  # neither was started again
    assert json.loads((laboratory.folder / "variants.json").read_text())["results"] == [row]


def test_groups_in_batches_and_pairs_of_vocabularies(laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch) -> None:
    compare_negatives(laboratory, ["batch-4-group-1"])
    (row,) = json.loads((laboratory.folder / "negatives.json").read_text())["results"]
    assert (row["batch"], row["group"]) == (4, 1)
    assert 1 < row["candidates"] <= 16
    monkeypatch.setattr("paper.vocabularies.SIZES", (300,))
    compare_vocabularies(laboratory, [])
    headless, vanilla = json.loads((laboratory.folder / "vocabularies.json").read_text())["results"]
    assert (headless["objective"], vanilla["objective"]) == ("headless", "vanilla")
    assert headless["vocabulary"] == vanilla["vocabulary"] == 300
    assert headless["headless is faster"] == headless["tokens/s"] / vanilla["tokens/s"]
    assert 0 < headless["bits per byte"] < 20


def test_decoders_along_training_and_with_a_trained_head(
    laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"SEEDS": (0,), "STEPS": 2, "POINTS": 2, "HEAD_STEPS": 2}.items():
        monkeypatch.setattr(f"paper.decoders.{name}", value)
    compare_decoders(laboratory, [])
    rows = json.loads((laboratory.folder / "decoders.json").read_text())["results"]
    assert [(row["objective"], row["head"], row["step"]) for row in rows] == [
        *(("headless", head, step) for step in (1, 2) for head in ("tied", "pmi")),
        *(("vanilla", "trained", step) for step in (1, 2)),
        ("headless", "trained", 2),
    ]
    (pmi,) = (row for row in rows if row["head"] == "pmi" and row["step"] == 2)
    assert pmi["perplexity"] == pytest.approx(
        read_metrics(laboratory.folder / "headless-0").validation[-1]["perplexity"]
    )


def test_encoders_with_clean_and_with_wrong_labels(laboratory: Laboratory) -> None:
    laboratory = replace(laboratory, settings=[*TINY, "batch.micro_size=16"])
    compare_encoders(laboratory, [])
    rows = json.loads((laboratory.folder / "encoders.json").read_text())["results"]
    assert [row["run"] for row in rows] == ["headless", "vanilla", "wrong-labels"]
    data = laboratory.folder.parent / "wordpiece-320"
    clean, wrong = (IndexedDataset(data / name) for name in ("text", "text-wrong"))
    same = [np.mean(clean[i] == wrong[i]) for i in range(len(clean))]
    assert 0.87 < np.mean(same) < 0.93
    assert all(clean[i][-1] == wrong[i][-1] for i in range(len(clean)))


def test_a_run_that_fails_is_told_with_the_end_of_its_log(laboratory: Laboratory) -> None:
    with pytest.raises(UserError, match=r"(?s)training broken must come to its end, but failed.*data\.tokenizer"):
        laboratory.train("small-headless", "broken")
