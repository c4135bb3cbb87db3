"""The step benchmark times objectives that must know the text, and phrases, on the rows that it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.rows import DRAWN, micro_batch, rule_of, token_rows
from benchmarks.steps import Contender, contending
from megahead.config.run import RunConfig
from megahead.data.loader import save_nearest_ids
from megahead.errors import ConfigError
from megahead.losses.contrastive import Vanilla, build_objective
from support.small_checkpoint import small_config

VOCABULARY = 61
IDS = {"mask_token": 3, "cls_token": 1, "sep_token": 2}
NEAREST = {"bias": "corrected", "nearest": 3}


def encoder(objective: dict[str, Any], nearest_ids: str | None = None) -> RunConfig:
    return small_config(
        model={"family": "bert", "num_layers": 1, "max_positions": 32},
        data={"train": "", "end_token": 2, "nearest_ids": nearest_ids},
        batch={"global_size": 8, "micro_size": 8},
        masking=IDS | {"rate": 0.4},
        objective=objective,
    )


def step_of(config: RunConfig, objective: str) -> Contender:
    contender = Contender(config, objective, torch.device("cpu"), token_rows(config, None, count=2))
    for index in range(2):
        contender.step(index)
    return contender


@pytest.mark.parametrize("objective", ["headless", "vanilla"])
@pytest.mark.parametrize(
    ("asked", "nearest_ids"),
    [
        ({"phrases": {"group_samples": 8, "shortest": 2}}, None),
        ({"bias": "corrected"}, None),
        ({"negatives": 20, "bias": "once"}, None),
        (NEAREST, DRAWN),
    ],
    ids=str,
)
def test_steps_of_every_objective_are_timed_and_of_vanilla_beside_it(
    asked: dict[str, Any], nearest_ids: str | None, objective: str
) -> None:
    contender = step_of(encoder(asked, nearest_ids), objective)
    assert contender.seconds()[0] > 0
    assert isinstance(contender.rule, Vanilla) == (objective == "vanilla")


def test_phrases_are_found_in_its_rows() -> None:
    config = encoder({"phrases": {"group_samples": 8}})
    (rows,) = token_rows(config, None, count=1)
    (group,) = micro_batch(config, rule_of(config, [rows]), rows).batch.auxiliary
    assert len(group.ends_Q) > 0


def test_ids_are_counted_in_its_rows() -> None:
    config = encoder({"bias": "corrected"})
    rows = token_rows(config, None, count=2)
    counts = torch.from_numpy(np.bincount(np.concatenate(rows).reshape(-1), minlength=VOCABULARY))
    targets = torch.tensor([5, 9, 9])
    mine, exact = (
        rule.pool(targets).candidates(targets)
        for rule in (rule_of(config, [*rows, np.full((1, 30), -1)]), build_objective(config.objective, 61, counts))
    )
    assert torch.equal(mine.bias_U, exact.bias_U)


def test_nearest_ids_are_those_of_the_file(tmp_path: Path) -> None:
    ids, target = np.arange(VOCABULARY)[:, None], torch.tensor([7])
    save_nearest_ids(tmp_path / "nearest.npy", ((ids + np.array([2, 4, 6])) % VOCABULARY).astype(np.int32))
    config = encoder(NEAREST, str(tmp_path / "nearest.npy"))
    pool = rule_of(config, token_rows(config, None, count=1)).pool(target)
    assert pool.candidates(target).ids_U.tolist() == [7, 9, 11, 13]


def test_a_file_of_too_few_nearest_ids_is_refused(tmp_path: Path) -> None:
    save_nearest_ids(tmp_path / "few.npy", np.array([[1], [0]]))
    with pytest.raises(ConfigError, match=r"`objective\.nearest` must be at most"):
        rule_of(encoder(NEAREST, str(tmp_path / "few.npy")), [np.array([[1, 2]])])


def test_drawn_ids_are_others_each_once() -> None:
    config = encoder(NEAREST, DRAWN)
    rule = rule_of(config, token_rows(config, None, count=1))
    for target in torch.arange(VOCABULARY):
        assert len(rule.pool(target[None]).candidates(target[None]).ids_U) == 4


def test_what_the_other_objective_does_not_know_is_left_out() -> None:
    asked = NEAREST | {"group_samples": 4, "temperature": 0.5, "score": "cosine", "learned_temperature": True}
    vanilla = contending(encoder(asked, DRAWN), "vanilla", "as it is")
    kept = vanilla.objective
    assert (kept.temperature, kept.score, kept.learned_temperature) == (0.5, "cosine", True)
    assert (kept.bias, kept.nearest, kept.group_samples, vanilla.data.nearest_ids) == ("paper", 0, "micro_batch", None)
    back = contending(encoder({"name": "vanilla", "output_bias": True}), "headless", "as it is")
    assert (back.objective.name, back.objective.output_bias) == ("headless", False)
