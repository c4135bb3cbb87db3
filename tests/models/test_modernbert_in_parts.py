"""A ModernBERT over a tensor group is the whole one, also with its tokens split: loss, gradients, scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megahead.config.run import RunConfig
from megahead.data.loader import training_collator
from megahead.distributed.group import Group
from megahead.estimate import rank_parameters
from megahead.losses.contrastive import build_objective
from megahead.models.parallel import shard_dims
from megahead.objectives.micro_batch import EvaluationRequest, MicroBatch
from megahead.objectives.pretraining import Pretraining, build_parallel_model
from support.initialized import initialized
from support.long import long
from support.on_ranks import on_ranks
from support.small_checkpoint import small_config

OBJECTIVES = {"headless": {}, "tied": {"name": "vanilla", "tied": True}}


def config_of(objective: dict[str, Any], tensor: int = 1, sequence: bool = False) -> RunConfig:
    shape = {"num_layers": 3, "hidden_size": 32, "num_heads": 4, "vocab_multiple": 32, "vocab_size": 47}
    return small_config(
        model={"family": "modernbert", **shape, "intermediate_size": 48, "local_window": 4},
        data={"end_token": 2, "sequence_length": 16},
        masking={"mask_token": 3, "cls_token": 1, "sep_token": 2, "rate": 0.3},
        objective=objective,
        parallel={"tensor": tensor, "sequence": sequence},
    )


def outcome(module: Pretraining, config: RunConfig) -> tuple[Tensor, float]:
    """The loss, after its backward pass, and what an evaluation says; of rows that hold several documents."""
    collator = training_collator(config, [])
    assert collator is not None
    text = np.random.default_rng(0).integers(2, 47, (3, 14))
    text[1, 10:] = -1
    batch = collator.batch(text, range(3))
    candidates = build_objective(config.objective, 47).candidate_set(batch.target_ids_N).candidates(batch.target_ids_N)
    module = module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(3)
    loss = module(MicroBatch(batch, (candidates,), 0.5))
    loss.backward()
    with torch.no_grad():
        scores = module(EvaluationRequest((batch,), torch.linspace(-2, 2, 47, dtype=torch.float64)))
    return loss.detach(), scores.loss


def split(group: Group, config: RunConfig) -> tuple[Tensor, float, dict[str, Tensor]]:
    module = initialized(config, group)
    loss, scores = outcome(module, config)
    dims = shard_dims(module)
    grads = {}
    for name, p in module.named_parameters():
        assert p.grad is not None, name
        grads[name] = p.grad if name not in dims else group.unshard(p.grad, dims[name])
    return loss, scores, grads


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("size", [1, 2, long(4)])
def test_loss_gradients_and_scores_equal_one_rank(size: int, sequence: bool, objective: str) -> None:
    module = initialized(config_of(OBJECTIVES[objective]))
    loss, scores = outcome(module, config_of(OBJECTIVES[objective]))
    for its_loss, its_scores, grads in on_ranks(size, split, config_of(OBJECTIVES[objective], size, sequence)):
        torch.testing.assert_close(its_loss, loss, rtol=0, atol=1e-10)
        assert its_scores == pytest.approx(scores, rel=1e-10)
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(
                grads[name], parameter.grad, rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
            )


def parameters(group: Group, config: RunConfig) -> int:
    return sum(parameter.numel() for parameter in build_parallel_model(config, group, torch.device("cpu")).parameters())


@pytest.mark.parametrize("size", [1, 2, long(4)])
def test_a_rank_holds_as_many_numbers_as_estimated(size: int) -> None:
    config = config_of({}, size)
    assert on_ranks(size, parameters, config)[0] == rank_parameters(config)
