"""Reading a run's log and drawing it."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megahead.commands import plot
from megahead.errors import UserError
from megahead.report.figures import draw_curves, save_figure
from megahead.report.panels import GEOMETRY, HELD_OUT, TRAINING, running_mean
from megahead.report.read import last_logged_step, read_metrics
from support.logged_run import evaluation, training, write_run


def test_training_and_validation_are_told_apart(tmp_path: Path) -> None:
    run = read_metrics(write_run(tmp_path / "first", training(1), training(2), evaluation(2, 80.0)))
    assert run.name == "first"
    assert [record["step"] for record in run.training] == [1, 2]
    assert run.validation == [{"step": 2, "tokens": 200, "seconds": 4.0, "perplexity": 80.0}]


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path: Path) -> None:
    run = read_metrics(write_run(tmp_path / "killed", training(1), tail='{"step": 2, "tok'))
    assert [record["step"] for record in run.training] == [1]


def test_the_last_step_is_read_from_the_end_of_a_log(tmp_path: Path) -> None:
    assert last_logged_step(tmp_path) == 0
    assert last_logged_step(write_run(tmp_path / "begun", tail='{"step": 1, "loss"')) == 0
    many = [training(step) for step in range(1, 2001)]
    run = write_run(tmp_path / "long", *many, evaluation(2000, 80.0), tail='{"step": 2001, "loss')
    assert (run / "metrics.jsonl").stat().st_size > 2 << 16
    assert last_logged_step(run) == read_metrics(run).training[-1]["step"] == 2000


def test_steps_done_again_after_a_resume_count_once(tmp_path: Path) -> None:
    records = [training(1), training(2), training(3, loss=7.0), training(2), training(3, loss=5.0)]
    run = read_metrics(write_run(tmp_path / "resumed", *records))
    assert [(record["step"], record["loss"]) for record in run.training] == [(1, 9.0), (2, 4.5), (3, 5.0)]


def test_a_session_counts_from_where_it_began(tmp_path: Path) -> None:
    """A longer run in the same folder that left no checkpoint, and one killed beyond its last."""
    began = {"step": 0, "tokens": 0, "seconds": 0.0, "session": {"resumed": None, "damaged": []}}
    resumed = {**began, "step": 2, "session": {"resumed": "step-00000002", "damaged": []}}
    earlier = [began, training(1), training(5), evaluation(5, 80.0)]
    run = read_metrics(
        write_run(
            tmp_path / "run", *earlier, began, training(2), training(4), evaluation(4, 90.0), resumed, training(3)
        )
    )
    assert [record["step"] for record in run.training] == [2, 3]
    assert not run.validation
    assert len(run.events) == 3


def test_what_was_taken_back_by_a_rollback_does_not_count(tmp_path: Path) -> None:
    """Lines are sparse: none of those written later is of a step that was taken back."""
    back = {"step": 8, "tokens": 1200, "seconds": 30.0, "rollback": {"checkpoint": "step-00000008"}}
    records = [training(5), training(8), training(10), evaluation(10, 80.0), back, training(12), evaluation(12, 60.0)]
    run = read_metrics(write_run(tmp_path / "run", *records))
    assert [record["step"] for record in run.training] == [5, 8, 12]
    assert [record["perplexity"] for record in run.validation] == [60.0]
    assert run.events == [back]


def test_a_session_that_went_on_from_elsewhere_has_no_part_in_what_stood_here(tmp_path: Path) -> None:
    session = {"resumed": "elsewhere/checkpoints/step-00000003", "continues": 0, "damaged": []}
    began = {"step": 3, "tokens": 300, "seconds": 6.0, "session": session}
    run = read_metrics(write_run(tmp_path / "run", training(2), evaluation(2, 9.0), began, training(4)))
    assert [record["step"] for record in run.training] == [4]
    assert not run.validation


@pytest.mark.parametrize(
    ("abandoned", "save"),
    [([11, 14], False), ([11, 14], True), ([11, 19, 25], True)],
    ids=["unsaved", "saved", "longer"],
)
def test_a_session_that_continues_what_an_earlier_one_left_takes_its_lines_back(
    tmp_path: Path, abandoned: list[int], save: bool
) -> None:
    """Someone resumed step 10, and was stopped before its first save: the newest checkpoint is still that of 20."""

    def session(step: int) -> dict[str, object]:
        return {"step": step, "tokens": 100 * step, "seconds": 2.0 * step, "session": {"continues": step}}

    saves = [{"step": 20, "tokens": 2000, "seconds": 40.0, "checkpoint": {"stall_seconds": 0.1}}] * save
    tasks = {"step": 20, "tokens": 2000, "seconds": 40.0, "tasks": {}}  # evaluated after the save
    records = [session(0), *map(training, range(1, 21)), *saves, evaluation(20, 80.0), tasks, training(21), session(10)]
    records += [*(training(step, loss=99.0) for step in abandoned), evaluation(11, 99.0), session(20)]
    run = read_metrics(write_run(tmp_path / "run", *records, training(22)))
    assert [record["step"] for record in run.training] == [*range(1, 21), 22]
    assert all(record["loss"] < 99 for record in run.training)
    assert [record["perplexity"] for record in run.validation] == [80.0]
    assert run.tasks == [tasks]
    assert len(run.events) == 3


@pytest.mark.parametrize("restart", [{"session": {"continues": 20}}, {"rollback": {"checkpoint": "step-20"}}], ids=str)
def test_a_copy_in_memory_continues_the_latest_history(tmp_path: Path, restart: dict[str, Any]) -> None:
    """Steps 21 to 29 were discarded; the next session recovers step 25 of those that were trained instead."""

    def at(step: int, fields: dict[str, Any]) -> dict[str, Any]:
        return {"step": step, "tokens": 100 * step, "seconds": 2.0 * step} | fields

    recovered = {"session": {"continues": 25, "memory": {"problems": [], "newer_by": 5}}}
    records = [*map(training, range(1, 21)), at(20, {"checkpoint": {}})]
    records += [*(training(step, loss=99.0) for step in range(21, 30)), at(20, restart)]
    records += [*map(training, range(21, 27)), at(25, recovered), training(26)]
    run = read_metrics(write_run(tmp_path / "run", *records))
    assert [record["step"] for record in run.training] == [*range(1, 27)]
    assert all(record["loss"] < 99 for record in run.training)


def test_no_run_a_broken_one_and_an_empty_one_are_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nothing/metrics\.jsonl must be the metrics of a run"):
        read_metrics(tmp_path / "nothing")
    with pytest.raises(UserError, match="line 2 is not"):
        read_metrics(write_run(tmp_path / "broken", training(1), {"step": 2}, training(3)))
    with pytest.raises(UserError, match="holds no line yet"):
        read_metrics(write_run(tmp_path / "empty"))


def test_the_figure_shows_the_logged_values(tmp_path: Path) -> None:
    records = [*(training(step) for step in range(1, 41)), evaluation(20, 300.0), evaluation(40, 150.0)]
    figure = draw_curves([read_metrics(write_run(tmp_path / "run", *records))])
    panels = {axes.get_title(loc="left"): axes for axes in figure.axes}
    (perplexity,) = panels["Held-out perplexity over time (log scale)"].lines
    np.testing.assert_allclose(perplexity.get_xdata(), [40, 80])  # seconds
    np.testing.assert_allclose(perplexity.get_ydata(), [300, 150])
    loss = panels["Training loss"].lines[0]
    np.testing.assert_allclose(loss.get_ydata(), [9 / step for step in range(1, 41)])
    assert [text.get_text() for text in panels["Held-out perplexity (log scale)"].texts] == ["150"]


def test_several_runs_are_named_with_their_last_perplexity(tmp_path: Path) -> None:
    runs = [read_metrics(write_run(tmp_path / name, training(1), evaluation(1, 1234.0))) for name in ("one", "two")]
    (legend,) = draw_curves(runs).legends
    assert [text.get_text() for text in legend.get_texts()] == ["one  ·  perplexity 1,234", "two  ·  perplexity 1,234"]


@pytest.mark.parametrize(
    "records",
    [
        [training(1), training(2, loss=math.nan, gradient_norm=math.inf), training(3, gradient_norm=None)],
        [evaluation(0, 80.0)],
    ],
    ids=["not finite", "one evaluation"],
)
def test_a_png_is_written_even_of_a_run_that_went_wrong(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    output = save_figure(
        draw_curves([read_metrics(write_run(tmp_path / "run", *records))]), tmp_path / "plots" / "run.png"
    )
    assert output.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in output.parent.iterdir()] == ["run.png"]


def test_the_command_draws_runs_and_their_tasks_and_prints_where_they_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = {"step": 2, "tokens": 200, "seconds": 4.0, "tasks": {"sciq": {"acc": {"value": 0.5, "stderr": 0.1}}}}
    one = write_run(tmp_path / "one", training(1), training(2), evaluation(2, 80.0), tasks)
    two = write_run(tmp_path / "two", training(1))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["plot", str(one), str(two)])
    plot.main()
    said = capsys.readouterr().out
    for drawn in (one / "curves.png", one / "curves-tasks.png"):
        assert f"wrote {drawn}" in said
        assert drawn.read_bytes().startswith(b"\x89PNG")
    rows = [line.split() for line in said.splitlines()[1:3]]
    assert rows == [["one", "2", "200", "4", "4.5", "80"], ["two", "1", "100", "2", "9"]]


def test_the_running_mean_forgets_a_huge_value() -> None:
    means = running_mean(np.array([1e18, *np.ones(300)]), 3)
    np.testing.assert_allclose(means[4:], 1)


def test_the_running_mean_leaves_out_what_is_not_finite() -> None:
    values = np.array([1.0, np.nan, 3.0, 5.0, 7.0])
    np.testing.assert_allclose(running_mean(values, 1), [1, 2, 4, 5, 6])
    np.testing.assert_allclose(running_mean(values, 0), values)


def test_shares_are_in_percent_and_nothing_else_is() -> None:
    for panel in (*TRAINING, *HELD_OUT, *GEOMETRY):
        assert panel.percent == panel.note.startswith("share"), panel.key
