"""The climb to a recipe: to the top of a hill that is known."""

from __future__ import annotations

from math import inf, log2

import pytest

from experiments.climb import Climb, Recipe
from experiments.measures import Row
from experiments.recipe import FIRST, START

TOP: Recipe = {"optimizer.learning_rate": 8e-3, "model.init_embedding_std": 0.01, "optimizer.betas": "[0.9,0.98]"}


def _hill(recipe: Recipe) -> Row:
    """Perplexity grows with each value that a recipe is away from the top."""
    rates = abs(log2(recipe["optimizer.learning_rate"] / TOP["optimizer.learning_rate"]))
    starts = abs(log2(recipe["model.init_embedding_std"] / TOP["model.init_embedding_std"]))
    return {"perplexity": 100 * (1 + 0.02 * (rates + starts + (recipe["optimizer.betas"] != TOP["optimizer.betas"])))}


def _hill_with_a_cliff(recipe: Recipe) -> Row:
    return _hill(recipe) if recipe["optimizer.learning_rate"] <= 4e-3 else {"perplexity": float("nan")}


def test_the_climb_ends_at_the_top() -> None:
    climb = Climb(FIRST, _hill)
    assert climb.to_the_top() == FIRST | TOP
    assert len(climb.rows) == len(climb.known) < 40  # each recipe once


def test_less_than_a_seed_apart_is_no_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.climb.LEAST_GAIN", 0.5)
    assert Climb(START, _hill).to_the_top() == START


def test_a_run_that_went_astray_is_no_gain() -> None:
    climb = Climb(FIRST, _hill_with_a_cliff)
    assert climb.to_the_top() == FIRST | TOP | {"optimizer.learning_rate": 4e-3}
    assert inf in climb.known.values()


def test_a_group_is_never_larger_than_the_batch() -> None:
    """However much it would gain."""
    climb = Climb(FIRST, lambda recipe: {"perplexity": 1000 / recipe["objective.group_samples"]})
    assert climb.to_the_top()["objective.group_samples"] == FIRST["batch.global_size"]
    assert all(int(row["objective.group_samples"]) <= int(row["batch.global_size"]) for row in climb.rows)


def test_no_setting_goes_below_its_least() -> None:
    """However much it would gain."""
    climb = Climb(START, lambda recipe: {"perplexity": recipe["batch.global_size"]}, {"batch.global_size": 16})
    assert climb.to_the_top()["batch.global_size"] == 16
    assert {int(row["batch.global_size"]) for row in climb.rows} == {16, 32}
