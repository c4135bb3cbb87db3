"""Sides on a small table of events: each one's best recipe gets the other seeds, and its scores are `next_item`'s."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from experiments.item_rivals import METRICS, best_recipe_on_all_seeds
from experiments.items import compare_items
from experiments.measures import Row
from experiments.runner import GRIDS, ExperimentRunner
from megahead.errors import FieldError
from megahead.evaluate.next_item import next_item
from megahead.hf.export import ensure_hf_folder
from megahead.report.read import read_metrics
from support.runner import TINY, results

SIDES = "headless", "softmax-tied"


def test_the_recipe_that_validation_prefers_is_trained_with_all_seeds() -> None:
    trained: list[tuple[float, int]] = []

    def train(recipe: Row, seed: int) -> Row:
        trained.append((recipe["rate"], seed))
        return {"validation NDCG@10": {0.1: 0.3, 0.2: 0.5, 0.3: 0.4}[recipe["rate"]], "MRR": seed}

    rows = best_recipe_on_all_seeds("SASRec", [{"rate": rate} for rate in (0.1, 0.2, 0.3)], [7, 8, 9], train)
    assert trained == [(0.1, 7), (0.2, 7), (0.3, 7), (0.2, 8), (0.2, 9)]
    assert [(row["model"], row["rate"], row["seed"], row["MRR"]) for row in rows] == [
        ("SASRec", 0.2, seed, seed) for seed in (7, 8, 9)
    ]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    draw = random.Random(0)
    rows = [f"u{draw.randrange(30)},i{draw.randrange(40)},{time}" for time in range(600)]
    path = tmp_path / "events.csv"
    path.write_text("\n".join(["who,what,when", *rows]))
    return path


def test_sides_are_scored_on_the_last_items(
    runner: ExperimentRunner, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"epochs": 1, "seeds": [0, 1], "recipes": [{"dropout": 0.1, "rate": 0.01}]}
    monkeypatch.setitem(GRIDS, "items", GRIDS["items"] | small)
    settings = [*(part for part in TINY if "training.steps" not in part), "batch.micro_size=16"]
    columns = ("who", "what", "when")
    lab = replace(runner, text=table, settings=settings, columns=columns, console=Console(record=True, quiet=True))
    compare_items(lab, SIDES)
    rows, means = results(lab, "items-runs"), results(lab, "items")
    assert [(row["model"], row["seed"]) for row in rows] == [(side, seed) for side in SIDES for seed in (0, 1)]
    first = rows[0]
    run = lab.folder / "headless-0.1-0.01-0"
    scores = {s.metric: s.value for s in next_item(ensure_hf_folder(run), lab.folder / "table/items-test.idx").scores}
    assert (first["HR@10"], first["MRR"]) == (scores["hr@10_unseen"], scores["mrr_unseen"])
    assert [(row["model"], row["seeds"]) for row in means] == [(side, 2) for side in SIDES]
    assert means[0]["NDCG@10"] == pytest.approx((rows[0]["NDCG@10"] + rows[1]["NDCG@10"]) / 2)
    assert all(row["CPU s"] > 0 for row in rows)


def test_runs_take_the_minutes_that_are_asked_for(
    runner: ExperimentRunner, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"seeds": [0], "recipes": [{"dropout": 0.1, "rate": rate} for rate in (0.01, 0.02)]}
    monkeypatch.setitem(GRIDS, "items", GRIDS["items"] | small)
    monkeypatch.setattr("experiments.runner.ExperimentRunner.step_seconds", lambda *_: 20.0)
    settings = [*(part for part in TINY if "training.steps" not in part), "batch.micro_size=16"]
    lab = replace(runner, text=table, settings=settings, columns=("who", "what", "when"), minutes=1.0)
    compare_items(lab, [SIDES[0]])
    assert [row["model"] for row in results(lab, "items-runs")] == [SIDES[0]]
    runs = [read_metrics(lab.folder / f"{SIDES[0]}-0.1-{rate}-0") for rate in (0.01, 0.02)]
    assert [run.training[-1]["step"] for run in runs] == [3, 3]


def test_a_command_that_is_killed_has_recorded_the_sides_before(
    runner: ExperimentRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scores(side: str, recipe: Row, seed: int) -> Row:
        if side != SIDES[0]:
            raise KeyboardInterrupt
        return dict.fromkeys(("validation NDCG@10", *METRICS, "CPU s"), 0.5)

    monkeypatch.setattr("experiments.items._Table.prepare", lambda runner: SimpleNamespace(scores=scores))
    with pytest.raises(KeyboardInterrupt):
        compare_items(runner, SIDES)
    assert {row["model"] for row in results(runner, "items-runs")} == {SIDES[0]}
    assert [row["model"] for row in results(runner, "items")] == [SIDES[0]]


def test_rivals_are_left_out_where_their_library_is_missing(
    runner: ExperimentRunner, table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no module named rectools >&2; exit 1\n")
    python.chmod(0o755)
    columns, console = ("who", "what", "when"), Console(width=200)
    lab = replace(runner, text=table, columns=columns, rivals_python=python, console=console)
    compare_items(lab, ["SASRec"])
    assert results(lab, "items") == []
    assert "left out: SASRec;" in capsys.readouterr().out


def test_rivals_that_train_by_epochs_take_no_minutes(runner: ExperimentRunner, table: Path) -> None:
    with pytest.raises(FieldError, match="`--minutes` must be left out with SASRec and BERT4Rec, trained by epochs"):
        compare_items(replace(runner, text=table, minutes=1.0), ["headless", "SASRec"])
