"""The long comparison, in tiny: runs that end at the same time, where they part, and what is told along the way."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.recipe import KINDS
from experiments.runner import ExperimentRunner
from experiments.verdict import GLUE_ROWS, Part, RunPlanner, compare_verdict
from megahead.config.loading import load_config
from megahead.errors import FieldError
from megahead.report.read import read_metrics
from support.blimp import write_blimp
from support.runner import results

TINY = [
    *("model.num_layers=1", "data.sequence_length=16", "batch.global_size=16", "batch.micro_size=4"),
    *("training.evaluate_samples=4", "training.log_seconds=0", "engine.compile=false"),
]


def write_passages(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    passages = [{"text": f"the cat saw the rat and the {word}"} for word in ("cat", "rat")]
    path.write_text("".join(json.dumps(passage) + "\n" for passage in passages))


def tasks_in(folder: Path) -> Path:
    """Files of the two tasks of the ends."""
    write_passages(folder / "lambada/lambada_test.jsonl")
    write_blimp(folder / "eval/blimp", {("one", "syntax"): [("a cat is here", "a cat are here")] * 2})
    return folder


@pytest.mark.long
def test_every_run_is_scored_along_its_way_and_branches_go_on_from_their_trunks(
    runner: ExperimentRunner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cloze = tmp_path / "passages.jsonl"
    write_passages(cloze)
    kinds = ("headless", "vanilla", "switched")
    shape = ("model.hidden_size=16", "model.num_heads=2")
    tiny = Part(shape, {0: (5, 10)}, {10: (0.2,)}, kinds, unit=2, vocabulary=320)
    monkeypatch.setattr("experiments.verdict.PARTS", {"tiny": tiny})
    monkeypatch.setattr("experiments.verdict.PROBE_STEPS", 1)
    monkeypatch.setattr("experiments.verdict._cloze", lambda _: cloze)
    monkeypatch.setattr("experiments.runner._cost", lambda run, _: 2.0 if run.name.endswith("vanilla") else 1.0)
    tiny_runner = replace(runner, settings=TINY, tasks_data=tasks_in(tmp_path / "tasks"))
    compare_verdict(tiny_runner, ["headless", "switched"])
    assert len(results(runner, "verdict-tiny-headless-switched-ends")) == 5
    compare_verdict(tiny_runner, [])
    ends = {(row["run"], row["budget"]): row for row in results(runner, "verdict-tiny-ends")}
    switched = "vanilla for the last 20%"
    names = [(run, budget) for run in ("headless", "vanilla", "headless, equal tokens") for budget in (5, 10)]
    assert [*ends] == [*names, (switched, 10)]
    steps = {name: row["tokens"] / (16 * 16) for name, row in ends.items()}
    assert [*steps.values()] == [10, 20, 5, 10, 5, 10, 16 + 2]
    for value in ("bits per byte", "cloze", "blimp", "all of blimp", "lambada", "all of cloze"):
        assert all(row[value] >= 0 for row in ends.values()), value
    assert all(row["lambada perplexity"] > 1 for row in ends.values())
    assert all(row["hours"] > 0 for row in ends.values())
    assert all(0 <= row["lambada"] <= 1 for row in ends.values())  # not its perplexity
    assert {row["all of blimp"] for row in ends.values()} <= {0, 0.5, 1}
    points = results(runner, "verdict-tiny")
    assert all("all of cloze ±" in row for row in points if row["end"])
    assert all(("lambada" in row) == row["end"] for row in points)
    times = {(row["run"], row["budget"]): row["time"] for row in points if row["end"]}
    assert times == {(run, budget): budget / 2 if "equal" in run else budget for run, budget in ends}
    assert [row["step"] for row in points if (row["run"], row["budget"]) == ("headless", 5)] == [10]
    branch, trunk = (read_metrics(runner.folder / f"tiny-0-headless-{budget}") for budget in (5, 10))
    assert branch.training[0]["step"] == 8 + 1
    assert trunk.training[0]["step"] == 1


def test_a_part_that_is_headless_alone_times_no_vanilla_steps(
    runner: ExperimentRunner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cloze = tmp_path / "passages.jsonl"
    write_passages(cloze)
    shape = ("model.hidden_size=16", "model.num_heads=2")
    tiny = Part(shape, {0: (5,)}, {}, kinds=("headless",), unit=1, vocabulary=320)
    monkeypatch.setattr("experiments.verdict.PARTS", {"tiny": tiny})
    monkeypatch.setattr("experiments.verdict._cloze", lambda _: cloze)
    compare_verdict(replace(runner, settings=TINY), [])
    assert [row["run"] for row in results(runner, "verdict-tiny-ends")] == ["headless"]
    assert not [*runner.folder.glob("tiny-probe-*")]


@pytest.mark.long
def test_encoders_are_scored_by_blimp_and_fine_tuned(
    runner: ExperimentRunner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shape = ("model.hidden_size=16", "model.num_heads=2", "model.intermediate_size=16")
    kinds = ("headless", "vanilla")
    longer = {"headless": ("optimizer.table.learning_rate_ratio=0.125",)}
    tiny = Part(shape, {0: (5, 10)}, {}, kinds, 2, "modernbert-15m-headless", True, 320, longer)
    monkeypatch.setattr("experiments.verdict.PARTS", {"tiny": tiny})
    monkeypatch.setattr("experiments.verdict.PROBE_STEPS", 1)
    monkeypatch.setattr("experiments.runner._cost", lambda run, _: 2.0 if run.name.endswith("vanilla") else 1.0)
    tuned: list[tuple[str, str]] = []
    monkeypatch.setattr("experiments.verdict.task_table", lambda results: results)
    monkeypatch.setattr(
        "experiments.verdict.fine_tune_on_glue", lambda _, name, __, rows: tuned.append((name, rows)) or []
    )
    compare_verdict(replace(runner, settings=TINY, tasks_data=tasks_in(tmp_path / "tasks")), [])
    ends = {(row["run"], row["budget"]): row for row in results(runner, "verdict-tiny-ends")}
    assert [*ends] == [(run, budget) for run in (*kinds, "headless, equal tokens") for budget in (5, 10)]
    for value in ("perplexity", "accuracy", "blimp", "all of blimp", "hours"):
        assert all(row[value] >= 0 for row in ends.values()), value
    assert all("bits per byte" not in row and "cloze" not in row for row in ends.values())
    assert tuned == [(f"tiny-0-{name}-10", GLUE_ROWS) for name in (*kinds, "headless-equal-tokens")]
    vanilla = load_config(runner.folder / "tiny-0-vanilla-10/config.yaml").objective
    assert (vanilla.name, vanilla.tied) == ("vanilla", True)
    rates = [
        load_config(runner.folder / f"tiny-0-{kind}-10/config.yaml").optimizer.table.learning_rate_ratio
        for kind in kinds
    ]
    assert rates == [0.125, KINDS["encoder"].found["vanilla"]["optimizer.table.learning_rate_ratio"]]


def test_parts_and_kinds_that_were_not_asked_for_are_left_out(
    runner: ExperimentRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[str, list[str]]] = []
    monkeypatch.setattr("experiments.verdict._compare", lambda _, name, __, kinds: compared.append((name, [*kinds])))
    for only in (["vanilla"], ["wide"], ["wide", "vanilla"], ["narrow", "headless", "switched"]):
        compare_verdict(runner, only)
    parts = ("narrow", "narrow-tied", "wide", "wide-level", "long", "level", "encoder", "encoder-level")
    vanilla = [(part, ["vanilla"]) for part in parts]
    wide = [("wide", ["headless", "vanilla"]), ("wide", ["vanilla"])]
    assert compared == [*vanilla, *wide, ("narrow", ["headless", "switched"])]
    names = r"narrow, narrow-tied, wide, wide-level, long, level, encoder, encoder-level, .*"
    with pytest.raises(FieldError, match=f"must name some of {names}, but is narow"):
        compare_verdict(runner, ["narow"])


PART = Part(
    shape=(),
    budgets={0: (5, 50), 1: (5,)},
    switches={5: (0.1, 0.2, 0.4), 50: (0.2,)},
    kinds=("headless", "vanilla", "switched"),
)
UNIT = PART.unit


def test_every_run_of_a_budget_takes_its_time() -> None:
    """Vanilla steps take four times as long."""
    planner = RunPlanner(PART, 0, UNIT // 4)
    runs = {planned.name: planned for planned in planner.all()}
    assert len(runs) == 4 + 2 + 4
    for name, planned in runs.items():
        taken = planner.units_at_step(planned, planned.steps)
        assert taken == pytest.approx(planned.budget / 4 if "equal-tokens" in name else planned.budget, rel=0.01), name
    for budget in PART.budgets[0]:
        assert runs[f"headless-equal-tokens-{budget}"].steps == runs[f"vanilla-{budget}"].steps
    switched = runs["vanilla-for-the-last-20-50"]
    assert (switched.steps, switched.vanilla_steps) == (40 * 128 + 10 * 32, 10 * 32)
    assert planner.units_at_step(switched, 40 * 128 + 32) == 41


@pytest.mark.parametrize("falls", [0.2, 0.6])
def test_rates_fall_in_the_last_part_of_the_time_whatever_is_learned_then(falls: float) -> None:
    planner = RunPlanner(replace(PART, decay=falls), 0, UNIT // 4)
    for planned in planner.all():
        stable = planner.units_at_step(planned, planned.steps - planned.decay_steps)
        assert stable == pytest.approx((1 - falls) * planner.units_at_step(planned, planned.steps), rel=0.01), (
            planned.name
        )


def test_no_run_is_made_twice_where_units_have_as_many_tokens() -> None:
    runs = [planned.name for planned in RunPlanner(replace(PART, switches={}), 0, UNIT).all()]
    assert runs == ["headless-5", "headless-50", "vanilla-5", "vanilla-50"]


def test_a_run_that_is_shorter_than_five_units_warms_up_for_less() -> None:
    planner = RunPlanner(PART, 1, 20)
    runs = {planned.name: planned for planned in planner.all()}
    warmups = {name: planner.warmup_steps(planned) for name, planned in runs.items()}
    assert (runs["headless-equal-tokens-5"].trunk, warmups["headless-equal-tokens-5"]) == (None, 20)
    assert (warmups["headless-5"], warmups["vanilla-5"]) == (UNIT, 20)


def test_no_run_warms_up_for_most_of_its_steps() -> None:
    planner = RunPlanner(Part(shape=(), budgets={0: (5,)}, switches={}, unit=64), 0, 18)
    for planned in planner.all():
        assert planner.warmup_steps(planned) * 5 == planned.steps


def test_a_branch_begins_at_a_checkpoint_of_its_trunk_at_which_neither_differs_yet() -> None:
    for seed in PART.budgets:
        planner = RunPlanner(PART, seed, UNIT // 4)
        trunks = {planned.name: planned for planned in planner.trunks()}
        for planned in planner.all():
            assert (planned.trunk is None) == (planned.name in trunks or planned.name == "headless-equal-tokens-5")
            if planned.trunk is not None:
                trunk = trunks[planned.trunk]
                assert planned.objective == trunk.objective
                assert 0 < planned.fork <= min(trunk.steps - trunk.decay_steps, planned.steps - planned.decay_steps)
                assert planned.fork <= planned.steps - planned.vanilla_steps
                assert planned.fork % planner.units[trunk.objective] == 0
                assert planned.fork % planner.keep_every(trunk) == 0
    forks = {planned.name: planned.fork for planned in RunPlanner(PART, 0, UNIT // 4).all()}
    assert forks["headless-5"] == 4 * UNIT
    assert forks["vanilla-for-the-last-40-5"] == 3 * UNIT
    assert forks["vanilla-for-the-last-10-5"] == 4 * UNIT


def test_what_a_part_leaves_out_is_left_out() -> None:
    wide = Part(shape=(), budgets={0: (5,)}, switches={}, kinds=("headless",))
    assert [planned.name for planned in RunPlanner(wide, 0, 32).all()] == ["headless-5"]
