"""The climb to a recipe: to the top of a hill that is known, and once with real runs, in tiny."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf, log2
from typing import Any

import pytest

from experiments.laboratory import Laboratory
from experiments.measures import Row
from experiments.recipe import FIRST, START, Climb, Recipe, compare_recipe
from megahead.errors import UserError
from support.laboratory import TINY, results

TOP: Recipe = {"optimizer.learning_rate": 8e-3, "model.init_embedding_std": 0.01, "optimizer.betas": "[0.9,0.98]"}


def _hill(_: Any, __: str, ___: str, recipe: Recipe, seed: int, times: int) -> Row:
    """Perplexity grows with each value that a recipe is away from the top."""
    rates = abs(log2(recipe["optimizer.learning_rate"] / TOP["optimizer.learning_rate"]))
    starts = abs(log2(recipe["model.init_embedding_std"] / TOP["model.init_embedding_std"]))
    return {"perplexity": 100 * (1 + 0.02 * (rates + starts + (recipe["optimizer.betas"] != TOP["optimizer.betas"])))}


def test_the_climb_ends_at_the_top(laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.recipe._trained", _hill)
    climb = Climb(laboratory, "headless", FIRST)
    assert climb.to_the_top() == FIRST | TOP
    assert len(climb.rows) == len(climb.known) < 40  # each recipe once


def test_less_than_a_seed_apart_is_no_gain(laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.recipe._trained", _hill)
    monkeypatch.setattr("experiments.recipe.LEAST_GAIN", 0.5)
    assert Climb(laboratory, "vanilla", START).to_the_top() == START


def test_a_run_that_went_astray_is_no_gain_and_one_that_failed_is_told(
    laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def steep(laboratory: Laboratory, objective: str, name: str, recipe: Recipe, seed: int, times: int) -> Row:
        if recipe["optimizer.learning_rate"] <= 4e-3:
            return _hill(laboratory, objective, name, recipe, seed, times)
        log = laboratory.folder / name / "metrics.jsonl"
        log.parent.mkdir(parents=True, exist_ok=True)
        where = {"step": 3, "tokens": 3, "seconds": 3}
        stopped, later = where | {"fault": {"action": "stop"}}, [] if astray else [where | {"session": {}}]
        lines = [where | {"session": {}}, where | {"loss": 9.0}, stopped, *later]
        log.write_text("".join(json.dumps(line) + "\n" for line in lines))
        raise UserError("training must come to its end")

    monkeypatch.setattr("experiments.recipe._trained", steep)
    astray = True
    climb = Climb(laboratory, "headless", FIRST)
    assert climb.to_the_top() == FIRST | TOP | {"optimizer.learning_rate": 4e-3}
    assert next(row["perplexity"] for row in climb.rows if row["optimizer.learning_rate"] == "0.008") == inf
    astray = False
    with pytest.raises(UserError, match="must come to its end"):
        Climb(laboratory, "headless", FIRST).to_the_top()


def test_the_recipe_found_is_held_against_the_demos(laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"VOCABULARY": 320, "ROWS": 64, "SEQUENCE": 16, "SEEDS": (0, 1), "LONGER": 2}.items():
        monkeypatch.setattr(f"experiments.recipe.{name}", value)
    monkeypatch.setattr("experiments.recipe.GRIDS", {"optimizer.learning_rate": (2e-3, 2e-2)})
    monkeypatch.setattr("experiments.recipe.FOUND", {"headless": {"optimizer.weight_decay": 0.3}})
    tiny = [
        one
        for one in TINY
        if one.split("=")[0] in {"model.num_layers", "model.hidden_size", "training.evaluate_samples"}
    ]
    compare_recipe(replace(laboratory, settings=[*tiny, "model.num_heads=2", "batch.micro_size=8"]), ["headless"])
    climbed = results(laboratory, "recipe-headless")
    assert [row["optimizer.learning_rate"] for row in climbed] == ["0.02", "0.002"]
    assert climbed[0]["perplexity"] < climbed[1]["perplexity"]
    held = {(row["recipe"], row["tokens"]): row for row in results(laboratory, "recipe-headless-held")}
    assert held.keys() == {(which, tokens) for which in ("first", "found") for tokens in (1024, 2048)}
    assert held["found", 1024]["seeds"] == 2
    assert held["found", 1024]["perplexity"] < held["first", 1024]["perplexity"]
