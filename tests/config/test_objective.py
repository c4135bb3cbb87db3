"""Which objectives may be asked for, and what a group comes to on given ranks."""

from __future__ import annotations

from typing import Any

import pytest

from megahead.config import BatchConfig, ObjectiveConfig, config_from_dict, resolve_group
from megahead.errors import ConfigError, ConfigErrors

BATCH = BatchConfig(global_size=32, micro_size=4)


def run_with(objective: dict[str, Any]) -> None:
    config_from_dict(
        {
            "name": "x",
            "model": {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "vocab_size": 50},
            "data": {"train": "nowhere", "sequence_length": 8},
            "batch": {"global_size": 4, "micro_size": 4},
            "objective": objective,
            "optimizer": {"learning_rate": 1e-3},
            "training": {"steps": 3},
        }
    )


@pytest.mark.parametrize(
    ("objective", "sentence"),
    [
        (
            {"name": "vanilla", "bias": "once"},
            "`objective.bias` must be left out of a vanilla objective, but is once instead; use name: headless.",
        ),
        (
            {"name": "vanilla", "negatives": 5},
            "`objective.negatives` must be left out of a vanilla objective, but is 5 instead; use name: headless.",
        ),
        (
            {"tied": True},
            "`objective.tied` must be left out of a headless objective without vanilla_weight, but is True instead.",
        ),
        (
            {"negatives_from": "uniform"},
            "`objective.negatives_from` must be left out without negatives, but is uniform instead; set negatives.",
        ),
        (
            {"group_samples": "everything"},
            "`objective.group_samples` must be a positive number of samples or micro_batch, data_parallel, "
            "global_batch, but is everything instead.",
        ),
        ({"vanilla_weight": 1}, "`objective.vanilla_weight` must be less than 1, but is 1 instead."),
    ],
)
def test_meaningless_combinations_are_refused_in_a_sentence(objective: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigErrors) as caught:
        run_with(objective)
    assert caught.value.problems == [sentence]


@pytest.mark.parametrize(
    ("fields", "head", "trains"),
    [
        ({}, "pmi", False),
        ({"bias": "once"}, "pmi", False),
        ({"bias": "corrected"}, "tied", False),
        ({"negatives": 9}, "pmi", False),
        ({"vanilla_weight": 0.1}, "trained", True),
        ({"vanilla_weight": 0.1, "tied": True}, "tied", False),
        ({"name": "vanilla"}, "trained", True),
        ({"name": "vanilla", "tied": True}, "tied", False),
    ],
)
def test_each_objective_has_its_head(fields: dict[str, Any], head: str, trains: bool) -> None:
    objective = ObjectiveConfig(**fields)
    assert (objective.head(), objective.trains_head()) == (head, trains)


@pytest.mark.parametrize(
    ("asked", "samples"), [("micro_batch", 4), ("data_parallel", 8), ("global_batch", 32), (2, 2), (16, 16)]
)
def test_a_group_is_a_number(asked: int | str, samples: int) -> None:
    objective = ObjectiveConfig(group_samples=asked)
    assert resolve_group(objective, BATCH, data_ranks=2) == samples
    assert resolve_group(objective, BATCH, data_ranks=4, stored=samples) == samples  # kept on another mesh


def test_a_group_that_the_run_cannot_hold_is_refused() -> None:
    for asked, rule in (
        (3, "divide batch.micro_size (4) or be a multiple"),
        (6, "divide batch.micro_size (4) or be a multiple"),
        (12, "divide batch.global_size (32)"),
        (64, "divide batch.global_size (32)"),
    ):
        with pytest.raises(ConfigError) as caught:
            resolve_group(ObjectiveConfig(group_samples=asked), BATCH, data_ranks=2)
        assert str(caught.value) == f"`objective.group_samples` must {rule}, but is {asked} instead."
    with pytest.raises(ConfigError, match=r"stay what the run began with \(16\)"):
        resolve_group(ObjectiveConfig(group_samples=8), BATCH, 2, stored=16)
    with pytest.raises(ConfigError, match=r"divide batch.micro_size \(4\) or be a multiple"):
        resolve_group(ObjectiveConfig(), BATCH, 2, stored=6)
