"""Encoders over a tensor group: loss, gradients and scores of one rank, from the same initial weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megahead.config.run import RunConfig
from megahead.distributed.group import Group
from megahead.losses.contrastive import build_objective
from megahead.models.parallel import shard_dims
from megahead.objectives.auxiliary import training_row_collator
from megahead.objectives.micro_batch import EvaluationRequest, MicroBatch
from megahead.objectives.pretraining import Pretraining
from support.initialized import initialized
from support.long import long
from support.on_ranks import on_ranks
from support.small_checkpoint import small_config

CPU = torch.device("cpu")
OBJECTIVES = {
    "headless": {"name": "headless"},
    "untied": {"name": "vanilla"},
    "tied": {"name": "vanilla", "tied": True},
    "mixed": {"vanilla_weight": 0.3, "learned_temperature": True},
    "phrases": {"phrases": {"group_samples": 4, "longest": 2}, "learned_temperature": True},
    "retromae": {"retromae": {}},
    "tsdae": {"tsdae": {}, "vanilla_weight": 0.3},
    "tsdae-untied": {"name": "vanilla", "tsdae": {}},
    "bag": {"retromae": {"bag_weight": 0.5}, "learned_temperature": True, "vanilla_weight": 0.3},
    "bag-untied": {"name": "vanilla", "retromae": {"bag_weight": 2}},
    "retromae-untied": {"name": "vanilla", "retromae": {"weight": 10}},
    "replaced": {"replaced_tokens": {"generator_layers": 1}, "learned_temperature": True},
    "replaced-untied": {"name": "vanilla", "replaced_tokens": {"generator_layers": 2, "weight": 10}},
}


def config_of(objective: dict[str, Any]) -> RunConfig:
    shape = {"hidden_size": 32, "num_heads": 4, "vocab_multiple": 32, "vocab_size": 47, "max_positions": 20}
    return small_config(
        model={"family": "bert", **shape, "hidden_dropout": 0.0, "attention_dropout": 0.0},
        data={"end_token": 2, "sequence_length": 16},
        masking={"mask_token": 3, "cls_token": 1, "sep_token": 2, "rate": 0.3},
        objective=objective,
    )


def outcome(module: Pretraining, config: RunConfig) -> tuple[Tensor, tuple[float, ...]]:
    collator = training_row_collator(config, [])
    text = np.random.default_rng(0).integers(2, 47, (3, 14))
    text[1, 10:], text[2, 4:] = -1, text[0, :10]
    batch = collator.batch(text, range(3))
    rule = build_objective(config.objective, 47)
    candidates = (rule.candidate_set(batch.target_ids_N).candidates(batch.target_ids_N),)
    own = batch.auxiliary.targets.ids_P if config.objective.retromae or config.objective.tsdae else None
    own_candidates = () if own is None else (rule.candidate_set(own).candidates(own),)
    module = module.double()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.startswith("mask_head"):
                parameter += torch.linspace(-1, 1, parameter.numel(), dtype=torch.float64).view_as(parameter)
    if config.objective.phrases:
        assert sum(len(group.ends_Q) for group in batch.auxiliary) > 0
    auxiliary_weight = 0.25 if config.objective.replaced_tokens or own_candidates else None
    loss = module(MicroBatch(batch, candidates, 0.5, auxiliary_weight, own_candidates))
    loss.backward()
    with torch.no_grad():
        scores = module(EvaluationRequest((batch,), torch.linspace(-2, 2, 47, dtype=torch.float64)))
    return loss.detach(), (scores.loss, scores.correct, scores.targets, *scores.auxiliary.values())


def split(group: Group, config: RunConfig) -> tuple[Tensor, tuple[float, ...], dict[str, Tensor]]:
    module = initialized(config, group)
    loss, scores = outcome(module, config)
    dims = shard_dims(module)
    grads = {}
    for name, p in module.named_parameters():
        assert p.grad is not None, name
        grads[name] = p.grad if name not in dims else torch.cat(group.all_gather(p.grad).unbind(), dims[name])
    return loss, scores, grads


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES.keys())
@pytest.mark.parametrize("size", [2, long(4)])
def test_loss_gradients_and_scores_equal_one_rank(size: int, objective: dict[str, Any]) -> None:
    config = config_of(objective)
    module = initialized(config)
    loss, scores = outcome(module, config)
    assert (len(scores) > 3) == ("replaced_tokens" in objective)
    for split_loss, split_scores, grads in on_ranks(size, split, config):
        torch.testing.assert_close(split_loss, loss, rtol=0, atol=1e-10)
        assert split_scores == pytest.approx(scores, rel=1e-10)
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad, rtol=0, atol=1e-10, msg=name)
