"""Encoders with RetroMAE's decoder and without, by both softmaxes, in tiny."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from experiments.measures import Row
from experiments.retrieval import Way, compare_retrieval
from experiments.runner import GRIDS, ExperimentRunner
from megahead.errors import FieldError
from support.runner import results

SMALL = ["model.num_layers=1", "model.hidden_size=16", "model.num_heads=2", "model.intermediate_size=16"]
SHORT = ["data.sequence_length=16", "batch.global_size=8", "batch.micro_size=8", "training.evaluate_samples=4"]


@pytest.mark.long
@pytest.mark.slow
def test_ways_are_tuned_alike_and_scored_before_and_after_tuning(
    runner: ExperimentRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"vocabulary": 320, "steps": 3, "seeds": [0, 1], "rates": ["1e-3", "2e-3"]}
    for name, value in sizes.items():
        monkeypatch.setitem(GRIDS["retrieval"], name, value)
    monkeypatch.setattr("experiments.runner.PROBE_STEPS", 4)
    _add_titles(runner)
    tiny = replace(runner, settings=[*SMALL, *SHORT, "engine.precision=fp32"])
    compare_retrieval(tiny, ["retromae-headless"])
    rows = results(runner, "retrieval-runs")
    assert [row["seed"] for row in rows if row["equal"] == "tokens"] == [0, 1]
    assert {row["way"] for row in rows} == {"retromae-headless"}
    assert len({row["rate"] for row in rows}) == 1
    assert all(0 <= row[name] <= 1 for row in rows for name in ("title_cls_recall@10", "tuned: title_cls_recall@10"))
    assert results(runner, "retrieval")[0]["seeds"] == 2
    articles = [json.loads(line)["title"] for line in (runner.folder / "articles/search.jsonl").open()]
    trained = [json.loads(line)["query"] for line in (runner.folder / "articles/pairs.jsonl").open()]
    assert len(articles) == 40
    assert not set(articles) & set(trained)


class StoppedComparison:
    """Has the rows of RetroMAE, and is stopped then."""

    def step_seconds(self, way: Way, overrides: Sequence[str]) -> float:
        return 1.0

    def best_rate(self, way: Way, overrides: Sequence[str]) -> str:
        if way.rule != "retromae":
            raise KeyboardInterrupt
        return "optimizer.learning_rate=1e-3"

    def rows(self, way: Way, overrides: Sequence[str], steps: int, equal: str) -> list[Row]:
        return [{"way": str(way), "equal": equal, "rate": "1e-3", "steps": steps, "seed": 0, "found": 0.5}]


def test_a_command_that_is_killed_has_recorded_the_ways_before(
    runner: ExperimentRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("experiments.retrieval.Comparison.prepare", lambda runner: StoppedComparison())
    with pytest.raises(KeyboardInterrupt):
        compare_retrieval(runner, [])
    ways = {f"retromae-{objective}" for objective in ("headless", "vanilla")}
    assert {row["way"] for row in results(runner, "retrieval-runs")} == ways
    assert {row["way"] for row in results(runner, "retrieval")} == ways


def test_an_unknown_way_is_refused(runner: ExperimentRunner) -> None:
    with pytest.raises(
        FieldError,
        match="retromae-headless, retromae-vanilla, dupmae-headless, dupmae-vanilla, tsdae-headless, tsdae-vanilla",
    ):
        compare_retrieval(runner, ["retromae"])


def _add_titles(runner: ExperimentRunner) -> None:
    text = runner.require_text()
    records = [json.loads(line) for line in text.open()]
    for number, record in enumerate(records):
        record |= {"title": f"{number} {record['text'][:20]}", "text": record["text"].replace(" ", ". ", 20)}
    text.write_text("".join(json.dumps(record) + "\n" for record in records))
