"""The step benchmark times objectives that must know the text, and phrases, on the rows that it has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.rows import build_run_objective, micro_batch, step_batches, token_rows
from benchmarks.steps import Variant, variant_config
from megahead.config.run import RunConfig
from megahead.distributed.group import Group
from megahead.losses.contrastive import VanillaObjective, build_objective
from megahead.objectives.pretraining import build_parallel_model, initial_weights, load_weights_
from support.small_checkpoint import small_config

VOCABULARY = 61
IDS = {"mask_token": 3, "cls_token": 1, "sep_token": 2}


def encoder(objective: dict[str, Any]) -> RunConfig:
    return small_config(
        model={"family": "bert", "num_layers": 1, "max_positions": 32},
        data={"train": "", "end_token": 2},
        batch={"global_size": 8, "micro_size": 8},
        masking=IDS | {"rate": 0.4},
        objective=objective,
    )


def step_of(config: RunConfig, objective: str) -> Variant:
    variant = Variant(config, objective, torch.device("cpu"), token_rows(config, None, count=2))
    for index in range(2):
        variant.step(index)
    return variant


@pytest.mark.parametrize("objective", ["headless", "vanilla"])
@pytest.mark.parametrize(
    "asked",
    [
        {"phrases": {"group_samples": 8, "shortest": 2}},
        {"retromae": {}},
        {"tsdae": {}},
        {"bias": "corrected"},
        {"negatives": 20, "bias": "once"},
    ],
    ids=str,
)
def test_steps_of_every_objective_are_timed_and_of_vanilla_beside_it(asked: dict[str, Any], objective: str) -> None:
    variant = step_of(encoder(asked), objective)
    assert variant.seconds()[0] > 0
    assert isinstance(variant.objective, VanillaObjective) == (objective == "vanilla")


@pytest.mark.parametrize("asked", [{}, {"retromae": {}}, {"tsdae": {}}], ids=str)
def test_a_micro_batch_alone_has_the_loss_of_its_step(asked: dict[str, Any]) -> None:
    config = encoder(asked)
    (rows,) = token_rows(config, None, count=1)
    objective = build_run_objective(config, [rows])
    step = step_batches(config, objective, [rows], torch.device("cpu"))
    model = build_parallel_model(config, Group(), torch.device("cpu"))
    load_weights_(model, Group(), initial_weights(config))
    model.eval()  # without dropout
    losses = [model(micro).item() for micro in (*step.micro_batches, micro_batch(config, objective, rows))]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_phrases_are_found_in_its_rows() -> None:
    config = encoder({"phrases": {"group_samples": 8}})
    (rows,) = token_rows(config, None, count=1)
    (micro,) = step_batches(config, build_run_objective(config, [rows]), [rows], torch.device("cpu")).micro_batches
    (group,) = micro.batch.auxiliary
    assert len(group.ends_Q) > 0


def test_ids_are_counted_in_its_rows() -> None:
    config = encoder({"bias": "corrected"})
    rows = token_rows(config, None, count=2)
    counts = torch.from_numpy(np.bincount(np.concatenate(rows).reshape(-1), minlength=VOCABULARY))
    targets = torch.tensor([5, 9, 9])
    mine, exact = (
        rule.candidate_set(targets).candidates(targets)
        for rule in (
            build_run_objective(config, [*rows, np.full((1, 30), -1)]),
            build_objective(config.objective, 61, counts),
        )
    )
    assert torch.equal(mine.bias_U, exact.bias_U)


def test_what_the_other_objective_does_not_know_is_left_out() -> None:
    asked = {
        "bias": "corrected",
        "group_samples": 4,
        "temperature": 0.5,
        "score": "cosine",
        "learned_temperature": True,
    }
    vanilla = variant_config(encoder(asked), "vanilla", "default")
    kept = vanilla.objective
    assert (kept.temperature, kept.score, kept.learned_temperature) == (0.5, "cosine", True)
    assert (kept.bias, kept.group_samples) == ("paper", "micro_batch")
    back = variant_config(encoder({"name": "vanilla", "output_bias": True}), "headless", "default")
    assert (back.objective.name, back.objective.output_bias) == ("headless", False)
