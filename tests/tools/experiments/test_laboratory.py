"""The experiments' laboratory: runs of the normal command, made once, reused, and recorded."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import pytest
import yaml

from experiments.laboratory import Laboratory, _finished, one_at_a_time, run_python
from experiments.negatives import compare_negatives
from experiments.variants import compare_variants
from megahead.config.loading import load_config
from megahead.errors import UserError
from megahead.report.read import read_metrics
from support.laboratory import TINY, run_logged


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


def test_what_two_commands_need_is_made_by_one_while_the_other_waits(tmp_path: Path) -> None:
    order: list[str] = []
    with ThreadPoolExecutor() as pool:
        with one_at_a_time(tmp_path / "folder/text"):
            waiting = pool.submit(lambda: _noted(tmp_path / "folder/text", order))
            with one_at_a_time(tmp_path / "folder/other"):
                time.sleep(0.2)
            order.append("first")
        waiting.result(timeout=60)
    assert order == ["first", "second"]


def _noted(output: Path, order: list[str]) -> None:
    with one_at_a_time(output):
        order.append("second")


def test_an_experiment_says_that_it_needs_a_text(laboratory: Laboratory) -> None:
    with pytest.raises(UserError, match="`--text` must name what this experiment reads, but is missing"):
        compare_negatives(replace(laboratory, text=None), [])


def test_a_run_that_was_stopped_is_no_result_until_it_went_on(
    laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(command: Sequence[str], log: TextIO, _: int) -> int:
        return run_logged([part.replace("training.steps=2", "training.steps=1") for part in command], log)

    monkeypatch.setattr("experiments.laboratory.run_python", stopped)
    with pytest.raises(UserError, match="training early must reach its last step, but was stopped; call again"):
        laboratory.train("small-headless", "early", *laboratory.data())
    monkeypatch.setattr("experiments.laboratory.run_python", run_logged)
    assert laboratory.train("small-headless", "early", *laboratory.data()).training[-1]["step"] == 2


def test_runs_train_on_as_many_ranks_as_asked(laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = laboratory.train("small-headless", "alone", *(data := laboratory.data()))
    monkeypatch.setattr("experiments.laboratory.run_python", run_python)
    both = replace(laboratory, ranks=2).train("small-headless", "both", *data)
    (began,) = (event["session"]["mesh"] for event in both.events if "session" in event)
    assert began["data"] == 2
    assert both.training[-1]["loss"] == pytest.approx(alone.training[-1]["loss"], rel=1e-4)


def test_a_run_that_fails_is_told_with_the_end_of_its_log(laboratory: Laboratory) -> None:
    with pytest.raises(UserError, match=r"(?s)training broken must come to its end, but failed.*data\.tokenizer"):
        laboratory.train("small-headless", "broken")


def test_a_folder_holds_a_result_when_its_settings_are_there_and_it_ended_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config("configs/small-headless.yaml", ["training.steps=400"])
    (tmp_path / "ending.json").write_text('{"ending": "finished", "step": 400, "steps": 400}')
    assert not _finished(tmp_path, config)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert _finished(tmp_path, config)
    auto = load_config("configs/small-headless.yaml", ["training.steps=400", "engine.precision=auto"])
    monkeypatch.setattr("megahead.train.run.multiplies_bf16_fast", lambda _: False)
    assert _finished(tmp_path, auto)
    monkeypatch.setattr("megahead.train.run.multiplies_bf16_fast", lambda _: True)
    assert not _finished(tmp_path, auto)
    (tmp_path / "ending.json").write_text('{"ending": "stopped", "step": 400, "steps": 400}')
    assert not _finished(tmp_path, config)  # it owes its last evaluation
    (tmp_path / "ending.json").unlink()
    assert not _finished(tmp_path, config)
