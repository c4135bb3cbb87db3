"""A comparison that was interrupted goes on where it was, and never takes a result for another."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megahead.errors import DataError
from megahead.evaluate.results import ResultsFile, Score, TaskResult

RESULT = TaskResult("sciq", 3, [Score("acc", 0.5, 0.1), Score("f1", 0.2, None)], limit=3)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "sciq.jsonl").write_text("{}")
    return tmp_path / "model"


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_what_was_kept_is_found_again_until_anything_changes(model: Path, weights: str) -> None:
    output, data = model.parent / "scores.json", model.parent / "sciq.jsonl"
    ResultsFile(output).add(model, model, data, RESULT)
    kept = ResultsFile(output)
    assert kept.find(model, model, "sciq", data, 3) == RESULT
    assert kept.find(model, model, "sciq", data, None) is None
    assert kept.find(model, model, "race", data, 3) is None
    data.write_text("{} ")
    assert kept.find(model, model, "sciq", data, 3) is None
    data.write_text("{}")
    (model / weights).write_bytes(b"others")
    assert kept.find(model, model, "sciq", data, 3) is None


def test_results_beside_the_weights_are_no_part_of_the_model(model: Path) -> None:
    data = model.parent / "sciq.jsonl"
    for name in ("results.json", "others.json"):
        ResultsFile(model / name).add(model, model, data, RESULT)
    assert ResultsFile(model / "results.json").find(model, model, "sciq", data, 3) == RESULT
    (model / "config.json").write_text("{}")
    assert ResultsFile(model / "results.json").find(model, model, "sciq", data, 3) is None


def test_a_folder_of_data_is_known_by_its_files(model: Path) -> None:
    data = model.parent / "blimp"
    data.mkdir()
    (data / "one.jsonl").write_text("{}")
    kept = ResultsFile(None)
    kept.add(model, model, data, replace(RESULT, task="blimp"))
    assert kept.find(model, model, "blimp", data, 3) is not None
    (data / "one.jsonl").write_text("{} ")
    assert kept.find(model, model, "blimp", data, 3) is None


def test_a_newer_result_takes_the_place_of_the_older_and_of_no_other(model: Path) -> None:
    output, data = model.parent / "scores.json", model.parent / "sciq.jsonl"
    kept = ResultsFile(output)
    for result in (RESULT, replace(RESULT, limit=None), replace(RESULT, samples=2)):
        kept.add(model, model, data, result)
    entries = json.loads(output.read_text())["results"]
    assert [(entry["limit"], entry["samples"]) for entry in entries] == [(None, 3), (3, 2)]


def test_two_commands_at_once_keep_each_others_results(model: Path) -> None:
    output, data = model.parent / "scores.json", model.parent / "sciq.jsonl"
    first, second = ResultsFile(output), ResultsFile(output)
    first.add(model, model, data, RESULT)
    second.add(model, model, data, replace(RESULT, task="race"))
    first.add(model, model, data, replace(RESULT, task="arc"))
    assert [result.task for result in ResultsFile(output).for_model(model, 3)] == ["sciq", "race", "arc"]


@pytest.mark.parametrize(
    "content",
    [
        '["mine"]',
        '{"results": {"blimp": {"acc": 0.5}}}',
        '{"results": ["mine"]}',
        '{"results": [{"model": "m", "task": "glue/cola", "seed": 0, "epochs": []}]}',  # of fine-tuning
    ],
)
def test_a_file_of_something_else_is_not_overwritten(tmp_path: Path, content: str) -> None:
    (tmp_path / "notes.json").write_text(content)
    with pytest.raises(DataError, match="name another --output"):
        ResultsFile(tmp_path / "notes.json")
