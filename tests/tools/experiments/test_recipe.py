"""The search for a recipe, with real runs, in tiny."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf

import pytest

from experiments.climb import Recipe
from experiments.laboratory import Laboratory
from experiments.measures import Row
from experiments.recipe import KINDS, Search, compare_recipe
from megahead.config import load_config, resolve_candidate_group_samples
from megahead.errors import FieldError, UserError
from support.laboratory import TINY, results

SMALL = {"model.num_layers", "model.hidden_size", "training.evaluate_samples"}


def _tiny(laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch, kind: str, objective: str) -> Laboratory:
    """Runs of a second, one setting of two values, and a first step found."""
    for name, value in {"SEEDS": (0, 1), "LONGER": 2}.items():
        monkeypatch.setattr(f"experiments.recipe.{name}", value)
    monkeypatch.setattr("experiments.climb.GRIDS", {"optimizer.learning_rate": (2e-3, 2e-2)})
    found, shape = {objective: {"optimizer.weight_decay": 0.3}}, ("data.sequence_length=16",)
    monkeypatch.setitem(KINDS, kind, replace(KINDS[kind], vocabulary=320, rows=160, shape=shape, found=found))
    tiny = [one for one in TINY if one.split("=")[0] in SMALL]
    return replace(laboratory, settings=[*tiny, "model.num_heads=2", "batch.micro_size=8"])


def test_a_run_that_went_astray_is_infinitely_bad_and_one_that_failed_is_told(
    laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(search: Search, name: str, recipe: Recipe, seed: int, times: int) -> Row:
        log = search.laboratory.folder / name / "metrics.jsonl"
        log.parent.mkdir(parents=True, exist_ok=True)
        where = {"step": 3, "tokens": 3, "seconds": 3}
        fault, later = where | {"fault": {"action": "stop"}}, [] if astray else [where | {"session": {}}]
        lines = [where | {"session": {}}, where | {"loss": 9.0}, fault, *later]
        log.write_text("".join(json.dumps(line) + "\n" for line in lines))
        raise UserError("training must come to its end")

    monkeypatch.setattr(Search, "_trained", stopped)
    search = Search(laboratory, "decoder", "headless")
    astray = True
    assert search._tried(search.start)["perplexity"] == inf
    astray = False
    with pytest.raises(UserError, match="must come to its end"):
        search._tried(search.start)


def test_the_recipe_found_is_held_against_the_first(laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch) -> None:
    compare_recipe(_tiny(laboratory, monkeypatch, "decoder", "headless"), ["decoder", "headless"])
    climbed = results(laboratory, "recipe-headless")
    assert [row["optimizer.learning_rate"] for row in climbed] == ["0.02", "0.002"]
    assert climbed[0]["perplexity"] < climbed[1]["perplexity"]
    held = {(row["recipe"], row["tokens"]): row for row in results(laboratory, "recipe-headless-held")}
    assert held.keys() == {(which, tokens) for which in ("first", "found") for tokens in (2560, 5120)}
    assert held["found", 2560]["seeds"] == 2
    assert held["found", 2560]["perplexity"] < held["first", 2560]["perplexity"]


def test_an_encoder_climbs_by_its_own_config(laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch) -> None:
    compare_recipe(_tiny(laboratory, monkeypatch, "encoder", "vanilla"), ["encoder", "vanilla"])
    (row,) = [row for row in results(laboratory, "recipe-encoder-vanilla-held") if row["recipe"] == "found"][:1]
    assert row["tokens"] == 2560
    config = load_config(laboratory.folder / "encoder-vanilla-first/config.yaml")
    assert (config.model.family, config.objective.name, config.masking is not None) == ("modernbert", "vanilla", True)


def test_an_unknown_name_is_refused(laboratory: Laboratory) -> None:
    with pytest.raises(FieldError, match="decoder, encoder, headless, vanilla"):
        compare_recipe(laboratory, ["electra"])


@pytest.mark.parametrize(
    ("config", "objective"),
    [("demo-headless", "headless"), ("demo-vanilla", "vanilla"), ("pythia-14m-headless", "headless")],
)
def test_configs_have_what_was_found(config: str, objective: str) -> None:
    """But for the batch, which goes with the text."""
    decoder = KINDS["decoder"]
    recipe = decoder.start[objective] | decoder.found[objective]
    kept = {
        name: value for name, value in recipe.items() if name not in ("batch.global_size", "model.init_embedding_std")
    }
    asked = [f"{name}={value}" for name, value in kept.items()]
    found, wanted = load_config(f"configs/{config}.yaml"), load_config(f"configs/{config}.yaml", asked)
    assert found.optimizer == wanted.optimizer
    assert found.schedule == wanted.schedule
    groups = [resolve_candidate_group_samples(one.objective, one.batch, data_ranks=1) for one in (found, wanted)]
    assert groups[0] == groups[1]
