"""Which objectives may be asked for, and what a group comes to on given ranks."""

from __future__ import annotations

from typing import Any

import pytest

from megahead.config.data import BatchConfig
from megahead.config.objective import ObjectiveConfig, resolve_candidate_group_samples
from megahead.errors import ConfigError

BATCH = BatchConfig(global_size=32, micro_size=4)


@pytest.mark.parametrize(
    ("fields", "head", "trains"),
    [
        ({}, "pmi", False),
        ({"bias": "once"}, "pmi", False),
        ({"bias": "corrected"}, "tied", False),
        ({"negatives": 9}, "pmi", False),
        ({"candidates": "own"}, "pmi", True),
        ({"candidates": "own", "bias": "corrected"}, "trained", True),
        ({"candidates": "own", "vanilla_weight": 0.1}, "trained", True),
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
    assert resolve_candidate_group_samples(objective, BATCH, data_ranks=2) == samples
    assert (
        resolve_candidate_group_samples(objective, BATCH, data_ranks=4, saved=samples) == samples
    )  # kept on another mesh


def test_a_group_that_the_run_cannot_hold_is_refused() -> None:
    for asked, rule in (
        (3, "divide batch.micro_size (4) or be a multiple"),
        (6, "divide batch.micro_size (4) or be a multiple"),
        (12, "divide batch.global_size (32)"),
        (64, "divide batch.global_size (32)"),
    ):
        with pytest.raises(ConfigError) as caught:
            resolve_candidate_group_samples(ObjectiveConfig(group_samples=asked), BATCH, data_ranks=2)
        assert str(caught.value) == f"`objective.group_samples` must {rule}, but is {asked} instead."
    with pytest.raises(ConfigError, match=r"stay what the run began with \(16\)"):
        resolve_candidate_group_samples(ObjectiveConfig(group_samples=8), BATCH, 2, saved=16)
    with pytest.raises(ConfigError, match=r"divide batch.micro_size \(4\) or be a multiple"):
        resolve_candidate_group_samples(ObjectiveConfig(), BATCH, 2, saved=6)
