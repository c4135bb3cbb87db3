"""The search to a recipe: to the top of a hill that is known, and with real runs, in tiny."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf, log2

import pytest

from experiments.measures import Row
from experiments.recipe import KINDS, SIDES, CoordinateSearch, Recipe, compare_recipe, to_overrides
from experiments.runner import ExperimentRunner
from megahead.config.loading import load_config
from megahead.config.objective import resolve_candidate_group_samples
from megahead.errors import FieldError, UserError
from support.runner import TINY, results

DECODER = KINDS["decoder"]
SMALL = {"model.num_layers", "model.hidden_size", "training.evaluate_samples"}
TOP: Recipe = {"optimizer.learning_rate": 0.002, "model.init_embedding_std": 0.01, "optimizer.betas": "[0.9,0.95]"}


def _tiny(runner: ExperimentRunner, monkeypatch: pytest.MonkeyPatch, kind: str, side: str) -> ExperimentRunner:
    """Runs of a second, one setting of two values, and a first step found."""
    for name, value in {"SEEDS": (0,), "FINAL_SEEDS": (0, 1), "LONG_RUN_FACTOR": 2}.items():
        monkeypatch.setattr(f"experiments.recipe.{name}", value)
    small = {"vocabulary": 320, "rows": 160, "shape": ("data.sequence_length=16",)}
    found, values = {side: {"optimizer.weight_decay": 0.3}}, {"optimizer.learning_rate": (2e-3, 2e-2)}
    monkeypatch.setitem(KINDS, kind, replace(KINDS[kind], **small, found=found, values=values))
    tiny = [one for one in TINY if one.split("=")[0] in SMALL]
    return replace(runner, settings=[*tiny, "model.num_heads=2", "batch.micro_size=8"])


def _hill(monkeypatch: pytest.MonkeyPatch, height: object) -> None:
    """Instead of runs: what `height` says of a recipe, for all seeds alike."""

    def trained(search: CoordinateSearch, recipe: Recipe, seed: int, data_rows: int) -> Row:
        assert callable(height)
        return {"side": search.side, "seed": seed, **recipe, "tokens": data_rows, "perplexity": height(recipe)}

    monkeypatch.setattr(CoordinateSearch, "_train", trained)


def _slope(recipe: Recipe) -> float:
    """Perplexity grows with each value that a recipe is away from the top."""
    away = [abs(log2(recipe[name] / TOP[name])) for name in ("optimizer.learning_rate", "model.init_embedding_std")]
    return 100 * (1 + 0.02 * (sum(away) + (recipe["optimizer.betas"] != TOP["optimizer.betas"])))


def test_all_sides_are_given_all_values_and_end_at_the_top(
    runner: ExperimentRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    _hill(monkeypatch, _slope)
    monkeypatch.setattr("experiments.recipe.ROUNDS", 1)
    monkeypatch.setattr("experiments.recipe.SEEDS", (0,))
    compare_recipe(runner, ["decoder"])
    rows = results(runner, "recipe-decoder")
    for side in SIDES:
        own = [row for row in rows if row["side"] == side]
        assert len(own) == len({tuple(row.items()) for row in own})  # each recipe and seed once
        for setting, values in DECODER.values.items():
            given = set(values) if side == "headless" or not setting.startswith("objective.") else {None}
            assert {row.get(setting) for row in own} == given - {32} if "group" in setting else given
    found = {row["side"]: row for row in results(runner, "recipe-decoder-held") if row["recipe"] == "found"}
    assert {side: row["perplexity"] for side, row in found.items()} == dict.fromkeys(SIDES, 100)


@pytest.mark.parametrize("gained", [0.4, 0.6])
def test_a_gain_of_less_than_half_a_percent_is_none(
    runner: ExperimentRunner, monkeypatch: pytest.MonkeyPatch, gained: float
) -> None:
    _hill(monkeypatch, lambda recipe: 100 - gained * (recipe["optimizer.learning_rate"] == 0.032))
    search = CoordinateSearch(runner, "decoder", "tied")
    before = search.recipe
    search.try_values("optimizer.learning_rate")
    assert (search.recipe == before) == (gained < 0.5)


def test_a_run_that_went_astray_is_no_gain(runner: ExperimentRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    _hill(monkeypatch, lambda recipe: float("nan") if recipe["optimizer.learning_rate"] < 0.004 else _slope(recipe))
    search = CoordinateSearch(runner, "decoder", "headless")
    search.try_values("optimizer.learning_rate")
    assert search.recipe["optimizer.learning_rate"] == 0.004
    assert inf in search.perplexity_by_recipe.values()


def test_a_group_is_never_larger_than_the_batch(runner: ExperimentRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much it would gain; and no batch is left out for a group's sake."""
    _hill(monkeypatch, lambda recipe: 1000 / recipe["objective.group_samples"])
    search = CoordinateSearch(runner, "decoder", "headless")
    search.try_values("batch.global_size")
    search.try_values("objective.group_samples")
    tried = [dict(recipe) for recipe in search.perplexity_by_recipe]
    pairs = {(recipe["batch.global_size"], recipe["objective.group_samples"]) for recipe in tried}
    assert pairs == {(8, 8), (16, 16), (32, 16), (16, 8), (16, 4)}


def test_a_run_that_diverged_is_infinitely_bad_and_one_that_failed_is_told(
    runner: ExperimentRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(search: CoordinateSearch, recipe: Recipe, seed: int, data_rows: int) -> Row:
        log = search.runner.folder / search._run_name(recipe, seed, data_rows) / "metrics.jsonl"
        log.parent.mkdir(parents=True, exist_ok=True)
        where = {"step": 3, "tokens": 3, "seconds": 3}
        fault, later = where | {"fault": {"action": "stop"}}, [] if astray else [where | {"session": {}}]
        lines = [where | {"session": {}}, where | {"loss": 9.0}, fault, *later]
        log.write_text("".join(json.dumps(line) + "\n" for line in lines))
        raise UserError("training must come to its end")

    monkeypatch.setattr(CoordinateSearch, "_train", stopped)
    astray = True
    search = CoordinateSearch(runner, "decoder", "headless")
    assert search.perplexity(search.recipe) == inf
    astray = False
    with pytest.raises(UserError, match="must come to its end"):
        CoordinateSearch(runner, "decoder", "headless").perplexity(search.recipe)


@pytest.mark.long
def test_the_recipe_found_is_held_against_the_first(runner: ExperimentRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = _tiny(runner, monkeypatch, "decoder", "headless")
    compare_recipe(tiny, ["decoder", "headless"])
    climbed = results(runner, "recipe-decoder-headless")
    assert [row["optimizer.learning_rate"] for row in climbed] == ["0.002", "0.02"]
    assert climbed[0]["perplexity"] > climbed[1]["perplexity"]
    assert all(row["cpu_seconds"] >= 0 and row["tokens"] == 160 * 16 for row in climbed)
    held = {(row["recipe"], row["tokens"]): row for row in results(runner, "recipe-decoder-headless-held")}
    assert held.keys() == {(which, tokens) for which in ("first", "found") for tokens in (2560, 5120)}
    assert held["found", 2560]["seeds"] == 2
    assert held["found", 2560]["perplexity"] < held["first", 2560]["perplexity"]

    def trained_again(*_: object) -> int:
        raise AssertionError("a run that has ended is reused")

    monkeypatch.setattr("experiments.runner.run_python", trained_again)
    compare_recipe(tiny, ["decoder", "headless"])
    assert results(runner, "recipe-decoder-headless") == climbed


def test_a_tied_encoder_climbs_by_its_own_config(runner: ExperimentRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    search = CoordinateSearch(_tiny(runner, monkeypatch, "encoder", "tied"), "encoder", "tied")
    assert search.perplexity(search.recipe) < inf
    config = load_config(next(runner.folder.glob("encoder-tied-*/config.yaml")))
    assert (config.model.family, config.masking is not None) == ("modernbert", True)
    assert (config.objective.name, config.objective.tied) == ("vanilla", True)


def test_an_unknown_name_is_refused(runner: ExperimentRunner) -> None:
    with pytest.raises(FieldError, match="decoder, encoder, headless, vanilla, tied"):
        compare_recipe(runner, ["electra"])


@pytest.mark.parametrize(
    ("config", "side"),
    [("demo-headless", "headless"), ("demo-vanilla", "vanilla"), ("pythia-14m-headless", "headless")],
)
def test_configs_have_what_was_found(config: str, side: str) -> None:
    """But for the batch, which goes with the text."""
    recipe = DECODER.initial_recipe(side) | DECODER.found[side]
    kept = {
        name: value for name, value in recipe.items() if name not in ("batch.global_size", "model.init_embedding_std")
    }
    found, wanted = (load_config(f"configs/{config}.yaml", asked) for asked in ([], to_overrides(kept)))
    assert found.optimizer == wanted.optimizer
    assert found.schedule == wanted.schedule
    groups = [resolve_candidate_group_samples(one.objective, one.batch, data_ranks=1) for one in (found, wanted)]
    assert groups[0] == groups[1]
