"""How rows are put together and drawn."""

from __future__ import annotations

import pytest
import torch

from experiments.charts import Chart, draw_charts
from experiments.measures import candidates, cost, lines, over_seeds, percent, speed, spent
from megahead.report.read import RunMetrics


def test_rows_over_seeds_and_lines() -> None:
    rows = [{"run": "a", "seed": seed, "x": seed, "loss": loss} for seed, loss in enumerate((1.0, 3.0))]
    rows.append({"run": "b", "seed": 0, "x": 0, "loss": 5.0})
    assert over_seeds(rows, ("run",), ("loss",)) == [
        {"run": "a", "seeds": 2, "loss": 2.0, "± loss": pytest.approx(2**0.5)},
        {"run": "b", "seeds": 1, "loss": 5.0, "± loss": None},
    ]
    assert lines(rows, "run", "x", "loss") == {"a": [(0, 1.0), (1, 3.0)], "b": [(0, 5.0)]}
    assert [percent(values) for values in ([0.5], [0.25, 0.75])] == ["50.0", "50.0 ± 35.4"]


def test_the_speed_of_a_run_in_phases_is_that_of_all_its_tokens() -> None:
    """Half of them at 100 tokens a second, half at 300; a line that something else slowed down counts for nothing."""
    speeds = [100, 100, 5, 300, 300, 300]
    training = [{"step": step, "tokens": 10 * step, "tokens_per_second": found} for step, found in enumerate(speeds, 1)]
    switch = {"step": 3, "tokens": 30, "seconds": 1.0, "session": {"new_phase": True}}
    assert speed(RunMetrics("a", training, [], events=[switch])) == 150
    assert speed(RunMetrics("a", training[3:], [])) == 300


def test_the_cost_of_a_token_is_all_steps_processor_time_over_all_tokens() -> None:
    training = [
        {"step": 2, "tokens": 20, "step_cpu_seconds": 1.0, "step_seconds": 7.0},
        {"step": 5, "tokens": 50, "step_cpu_seconds": 3.0, "step_seconds": 9.0},
    ]
    seconds = (2 * 7 + 3 * 9) if torch.cuda.is_available() else (2 * 1 + 3 * 3)
    run = RunMetrics("a", training, [])
    assert cost(run) == seconds / 50
    assert spent(run) == seconds
    assert spent(run, until=3) == ((2 * 7 + 9) if torch.cuda.is_available() else (2 * 1 + 3))
    begun = {"step": 1, "tokens": 10, "seconds": 1.0, "session": {"resumed": "elsewhere"}}
    assert (
        spent(RunMetrics("a", training, [], events=[begun]))
        == seconds - training[0]["step_seconds" if torch.cuda.is_available() else "step_cpu_seconds"]
    )


def test_candidates_are_those_of_the_steps_asked_for() -> None:
    training = [{"step": step, "tokens": step, "candidates": 100 * step} for step in (1, 2, 3)]
    training.append({"step": 4, "tokens": 4})
    run = RunMetrics("a", training, [])
    assert candidates(run) == 200
    assert candidates(run, range(2)) == 150
    assert candidates(run, range(3, 4)) is None


def test_charts_have_one_colour_a_name_and_mark_the_points() -> None:
    two = {"headless": [(1, 2.0), (4, 3.0)], "vanilla": [(4, 9.0), (1, 8.0)]}
    figure = draw_charts([Chart("one", "rows", two, log_across=True, from_zero=True), Chart("two", "rows", two)])
    first, second = figure.axes
    assert [line.get_color() for line in first.get_lines()] == [line.get_color() for line in second.get_lines()]
    assert list(first.get_lines()[1].get_xdata()) == [1, 4]  # from left to right, however the rows came
    assert [label.get_text() for label in first.get_xticklabels()] == ["1", "4"]
    assert first.get_ylim()[0] == 0 < second.get_ylim()[0]
