"""The experiments' runner: runs of the normal command, made once, reused, recorded, compared and drawn."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from subprocess import CompletedProcess
from typing import TextIO

import paper
import pytest
import torch
import yaml
from rich.console import Console

from experiments.figures import compare_negatives, compare_variants
from experiments.measures import (
    Chart,
    aggregate_seeds,
    draw_charts,
    group_points,
    mean_candidates,
    percent,
    time_spent,
    tokens_per_second,
)
from experiments.runner import ExperimentRunner, _is_finished, run_python
from megahead.config.loading import load_config
from megahead.data.indexed import IndexedDataset
from megahead.errors import FieldError, UserError
from megahead.report.read import RunMetrics, read_metrics
from megahead.run_folder import RunFolder
from steps.once import output_lock
from support.commands import ROOT
from support.forked import fork_pythons
from support.runner import TINY, run_logged


def test_a_variant_is_trained_once_scored_with_both_heads_and_recorded(runner: ExperimentRunner) -> None:
    compare_variants(runner, ["paper, group 4"])
    record = json.loads((runner.folder / "variants.json").read_text())
    (row,) = record["results"]
    run, head = (runner.folder / name for name in ("paper-group-4", "paper-group-4-head"))
    assert row["run"] == "paper, group 4"
    assert row["own head: perplexity"] == read_metrics(run).validation[-1]["perplexity"]
    assert row["trained head: perplexity"] == read_metrics(head).validation[-1]["perplexity"]
    assert record["settings"] == TINY
    assert record["runs"]["paper-group-4"]["tokens"] == 2 * 16 * 16
    assert record["runs"]["paper-group-4-head"]["config"]["objective"]["name"] == "vanilla"
    assert "| paper, group 4 |" in (runner.folder / "variants.md").read_text()

    logs = [(folder / "log.txt").read_text() for folder in (run, head)]
    compare_variants(runner, ["paper, group 4"])
    assert [(folder / "log.txt").read_text() for folder in (run, head)] == logs  # neither was started again
    assert json.loads((runner.folder / "variants.json").read_text())["results"] == [row]


@pytest.mark.parametrize("experiment", paper.EXPERIMENTS)
def test_a_name_that_an_experiment_does_not_have_is_refused_before_any_work(tmp_path: Path, experiment: str) -> None:
    compare = getattr(import_module(f"experiments.{paper.EXPERIMENTS[experiment]}"), f"compare_{experiment}")
    with pytest.raises(FieldError, match=r"`--only` must name some of .*, but is retrmae"):
        compare(ExperimentRunner(tmp_path, Path("text"), [], Console()), ["retrmae"])
    assert not list(tmp_path.iterdir())


def test_the_command_gives_an_experiment_what_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.jsonl").write_text('{"text": "the cat"}')
    monkeypatch.chdir(tmp_path)
    given: list[tuple[ExperimentRunner, list[str]]] = []
    monkeypatch.setattr("experiments.figures.compare_negatives", lambda runner, names: given.append((runner, names)))
    words = "paper.py negatives --text text.jsonl --folder lab --only one two --ranks 2 --set a.b=1 --set a.c=2"
    monkeypatch.setattr(sys, "argv", words.split())
    paper.main()
    ((runner, names),) = given
    assert (runner.folder, runner.text) == (tmp_path / "lab/negatives", tmp_path / "text.jsonl")
    assert (names, runner.ranks, runner.settings) == (["one", "two"], 2, ["a.b=1", "a.c=2"])


def test_what_two_commands_need_is_made_by_one_while_the_other_waits(tmp_path: Path) -> None:
    order: list[str] = []
    with ThreadPoolExecutor() as pool:
        with output_lock(tmp_path / "folder/text"):
            waiting = pool.submit(lambda: _noted(tmp_path / "folder/text", order))
            with output_lock(tmp_path / "folder/other"):
                time.sleep(0.2)
            order.append("first")
        waiting.result(timeout=60)
    assert order == ["first", "second"]


def _noted(output: Path, order: list[str]) -> None:
    with output_lock(output):
        order.append("second")


def test_what_was_made_is_made_again_once_its_arguments_change(runner: ExperimentRunner) -> None:
    made = runner.folder.parent / "bpe-320/text.idx"
    runner.data()
    before = made.stat().st_mtime_ns
    runner.data()
    assert made.stat().st_mtime_ns == before  # reused, as in the folder that it was copied from
    fewer = replace(runner, held_out=10)
    fewer.data()
    assert made.stat().st_mtime_ns != before
    assert len(IndexedDataset(made.parent / "text-validation")) == 40


def test_an_encoder_reads_the_text_in_the_ids_of_an_existing_tokenizer(runner: ExperimentRunner) -> None:
    own = dict(override.split("=", 1) for override in runner.data(encoder=True))
    tokenizer = Path(own["data.tokenizer"]).rename(runner.folder / "theirs.json")
    given = dict(override.split("=", 1) for override in runner.data_with_tokenizer(tokenizer, encoder=True))
    datasets = [given.pop("data.train"), own.pop("data.train")]
    assert given.pop("data.tokenizer") == str(tokenizer)
    del own["data.tokenizer"]
    assert given == own | {"data.validation": f"{datasets[0]}-validation"}
    first, second = map(IndexedDataset, datasets)
    assert all((first[number] == second[number]).all() for number in range(len(first)))


def test_an_experiment_says_that_it_needs_a_text(runner: ExperimentRunner) -> None:
    with pytest.raises(UserError, match="`--text` must name what this experiment reads, but is missing"):
        compare_negatives(replace(runner, text=None), [])


def test_a_run_that_was_stopped_is_no_result_until_it_went_on(
    runner: ExperimentRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(command: Sequence[str], log: TextIO, _: int) -> int:
        return run_logged([part.replace("training.steps=2", "training.steps=1") for part in command], log)

    monkeypatch.setattr("experiments.runner.run_python", stopped)
    with pytest.raises(UserError, match="training early must reach its last step, but was stopped; call again"):
        runner.train("small-headless", "early", *runner.data())
    monkeypatch.setattr("experiments.runner.run_python", run_logged)
    assert runner.train("small-headless", "early", *runner.data()).training[-1]["step"] == 2


def test_python_runs_in_the_projects_root_on_as_many_ranks_as_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "log").open("w") as log:
        assert run_python(["-c", "import os; print(os.getcwd()); raise SystemExit(3)"], log) == 3
    assert (tmp_path / "log").read_text() == f"{ROOT}\n"
    commands = list[list[str]]()
    monkeypatch.setattr("subprocess.run", lambda command, **_: commands.append(command) or CompletedProcess(command, 0))
    assert run_python(["-m", "megahead"], sys.stdout, ranks=2) == 0
    assert commands[0][-4:] == ["--nproc_per_node", "2", "-m", "megahead"]


@pytest.mark.long
def test_runs_train_on_as_many_ranks_as_asked(runner: ExperimentRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = runner.train("small-headless", "alone", *(data := runner.data()))
    monkeypatch.setattr("experiments.runner.run_python", run_python)
    fork_pythons(monkeypatch)
    both = replace(runner, ranks=2).train("small-headless", "both", *data)
    (began,) = (event["session"]["mesh"] for event in both.events if "session" in event)
    assert began["data"] == 2
    assert both.training[-1]["loss"] == pytest.approx(alone.training[-1]["loss"], rel=1e-4)


def test_a_run_that_fails_is_told_with_the_end_of_its_log(runner: ExperimentRunner) -> None:
    with pytest.raises(UserError, match=r"(?s)training broken must come to its end, but failed.*data\.tokenizer"):
        runner.train("small-headless", "broken")


def test_a_folder_holds_a_result_when_its_settings_are_there_and_it_ended_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config("configs/small-headless.yaml", ["training.steps=400"])
    (tmp_path / "ending.json").write_text('{"ending": "finished", "step": 400, "steps": 400}')
    assert not _is_finished(tmp_path, config)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert _is_finished(tmp_path, config)
    auto = load_config("configs/small-headless.yaml", ["training.steps=400", "engine.precision=auto"])
    monkeypatch.setattr("megahead.train.run.has_fast_bf16", lambda _: False)
    assert _is_finished(tmp_path, auto)
    monkeypatch.setattr("megahead.train.run.has_fast_bf16", lambda _: True)
    assert not _is_finished(tmp_path, auto)
    (tmp_path / "ending.json").write_text('{"ending": "stopped", "step": 400, "steps": 400}')
    assert not _is_finished(tmp_path, config)  # it owes its last evaluation
    (tmp_path / "ending.json").unlink()
    assert not _is_finished(tmp_path, config)


STEPS = 12


def logged(name: str, beside: float, alone: float, until: int) -> RunMetrics:
    """A run whose steps cost `beside` another one until that has ended at second `until`, and `alone` then; its first
    is the dearest."""
    group_points, now = [], 0.0
    for step in range(1, STEPS + 1):
        price = 50.0 if step == 1 else beside if now < until else alone
        now += price
        group_points.append({"step": step, "tokens": 10 * step, "seconds": now, "step_cpu_seconds": price})
    return RunMetrics(name, group_points, ())


def test_costs_are_of_the_time_in_which_both_run(runner: ExperimentRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    cheap_ends = 50 + 11 * 3
    runs = {"cheap": logged("cheap", 3, 3, 999), "dear": logged("dear", 9, 6, cheap_ends)}
    monkeypatch.setattr(ExperimentRunner, "train", lambda _, config, name, *given: runs[name])
    assert runner.relative_cost("small-headless", {"dear": [], "cheap": []}) == 3
    assert runner.relative_cost("small-headless", {"cheap": [], "dear": []}) == 1 / 3


def test_a_pair_of_which_one_was_stopped_begins_anew(runner: ExperimentRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = {"ours": 3.0, "theirs": 2.0}
    monkeypatch.setattr("experiments.runner._cost", lambda run, _: costs[run.name])
    was_there: dict[str, bool] = {}

    def train(quiet: ExperimentRunner, config: str, name: str, *given: str) -> RunMetrics:
        run = RunFolder(quiet.folder / name)
        was_there[name] = run.path.exists()
        end(run, "finished")
        return logged(name, 1, 1, 0)

    def end(run: RunFolder, ending: str) -> None:
        run.path.mkdir(parents=True, exist_ok=True)
        run.session_end.write_text(json.dumps({"ending": ending}))

    monkeypatch.setattr(ExperimentRunner, "train", train)
    end(RunFolder(runner.folder / "ours"), "stopped")
    end(RunFolder(runner.folder / "theirs"), "finished")
    for there in (False, True):
        assert runner.relative_cost("small-headless", {"ours": [], "theirs": []}) == 1.5
        assert was_there == {"ours": there, "theirs": there}


def test_rows_over_seeds_and_lines() -> None:
    rows = [{"run": "a", "seed": seed, "x": seed, "loss": loss} for seed, loss in enumerate((1.0, 3.0))]
    rows.append({"run": "b", "seed": 0, "x": 0, "loss": 5.0})
    assert aggregate_seeds(rows, ("run",), ("loss",)) == [
        {"run": "a", "seeds": 2, "loss": 2.0, "± loss": pytest.approx(2**0.5)},
        {"run": "b", "seeds": 1, "loss": 5.0, "± loss": None},
    ]
    assert group_points(rows, "run", "x", "loss") == {"a": [(0, 1.0), (1, 3.0)], "b": [(0, 5.0)]}
    assert [percent(values) for values in ([0.5], [0.25, 0.75])] == ["50.0", "50.0 ± 35.4"]


def test_the_speed_of_a_run_in_phases_is_that_of_all_its_tokens() -> None:
    """Half of them at 100 tokens a second, half at 300; a line that something else slowed down counts for nothing."""
    speeds = [100, 100, 5, 300, 300, 300]
    training = [{"step": step, "tokens": 10 * step, "tokens_per_second": found} for step, found in enumerate(speeds, 1)]
    switch = {"step": 3, "tokens": 30, "seconds": 1.0, "session": {"new_phase": True}}
    assert tokens_per_second(RunMetrics("a", training, [], events=[switch])) == 150
    assert tokens_per_second(RunMetrics("a", training[3:], [])) == 300


def test_time_spent_is_all_steps_processor_time() -> None:
    training = [
        {"step": 2, "tokens": 20, "step_cpu_seconds": 1.0, "step_seconds": 7.0},
        {"step": 5, "tokens": 50, "step_cpu_seconds": 3.0, "step_seconds": 9.0},
    ]
    seconds = (2 * 7 + 3 * 9) if torch.cuda.is_available() else (2 * 1 + 3 * 3)
    run = RunMetrics("a", training, [])
    assert time_spent(run) == seconds
    assert time_spent(run, last_step=3) == ((2 * 7 + 9) if torch.cuda.is_available() else (2 * 1 + 3))
    begun = {"step": 1, "tokens": 10, "seconds": 1.0, "session": {"resumed": "elsewhere"}}
    assert (
        time_spent(RunMetrics("a", training, [], events=[begun]))
        == seconds - training[0]["step_seconds" if torch.cuda.is_available() else "step_cpu_seconds"]
    )


def test_candidates_are_those_of_the_steps_asked_for() -> None:
    training = [{"step": step, "tokens": step, "candidates": 100 * step} for step in (1, 2, 3)]
    training.append({"step": 4, "tokens": 4})
    run = RunMetrics("a", training, [])
    assert mean_candidates(run) == 200
    assert mean_candidates(run, range(2)) == 150
    assert mean_candidates(run, range(3, 4)) is None


def test_charts_have_one_colour_a_name_and_mark_the_points() -> None:
    two = {"headless": [(1, 2.0), (4, 3.0)], "vanilla": [(4, 9.0), (1, 8.0)]}
    figure = draw_charts([Chart("one", "rows", two, log_x=True, from_zero=True), Chart("two", "rows", two)])
    first, second = figure.axes
    assert [line.get_color() for line in first.get_lines()] == [line.get_color() for line in second.get_lines()]
    assert list(first.get_lines()[1].get_xdata()) == [1, 4]  # from left to right, however the rows came
    assert [label.get_text() for label in first.get_xticklabels()] == ["1", "4"]
    assert first.get_ylim()[0] == 0 < second.get_ylim()[0]
