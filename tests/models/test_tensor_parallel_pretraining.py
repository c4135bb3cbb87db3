"""The whole objective over a tensor group: loss, gradients and scores of one rank, from the same initial weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megahead.config.run import RunConfig
from megahead.data.batch import Batch
from megahead.distributed.group import Group
from megahead.errors import ConfigErrors
from megahead.losses.contrastive import build_objective
from megahead.models.parallel import shard_dims
from megahead.objectives.micro_batch import EvaluationRequest, MicroBatch
from megahead.objectives.pretraining import Pretraining
from support.initialized import initialized
from support.long import long
from support.on_ranks import on_ranks
from support.small_checkpoint import small_config

CPU = torch.device("cpu")
OBJECTIVES = {
    "headless": {"name": "headless"},
    "own-once": {"bias": "own_once", "negatives": 7},
    "corrected": {"bias": "corrected", "learned_temperature": True},
    "capped": {"max_candidates": 5},
    "mixed": {"vanilla_weight": 0.3},
    "own": {"candidates": "own", "vanilla_weight": 0.3},
    "untied": {"name": "vanilla"},
    "tied": {"name": "vanilla", "tied": True},
    "cosine": {"score": "cosine", "learned_temperature": True},
    "harmonic": {"score": "harmonic", "bias": "own_once"},
    "harmonic-vanilla": {"score": "harmonic", "name": "vanilla", "output_bias": True},
}
MODEL = {"hidden_size": 32, "num_heads": 4, "vocab_multiple": 32, "vocab_size": 47}


def config_of(objective: dict[str, Any], sequence: int | None = None, **model: Any) -> RunConfig:
    """`sequence`: the tensor ranks over which tokens are split too."""
    mesh = {"tensor": sequence, "sequence": True} if sequence else {}
    return small_config(model={**MODEL, **model}, objective={**objective, "temperature": 0.5}, parallel=mesh)


def micro_batch(config: RunConfig, targets: int | None = None) -> MicroBatch:
    g = torch.Generator().manual_seed(4)
    rows = torch.randint(config.model.vocab_size, (2, 13), generator=g)
    index = torch.arange(24)[:targets]
    ids = torch.randint(config.model.vocab_size, (len(index),), generator=g)
    positions = torch.tensor([[*range(5), *range(7)], [*range(12)]])
    batch = Batch(rows[:, :-1], positions, index, ids)
    objective = build_objective(config.objective, config.model.vocab_size, torch.arange(config.model.vocab_size))
    groups = ids.tensor_split([len(ids) // 3]) if config.objective.name == "headless" else (ids,)
    return MicroBatch(batch, tuple(objective.candidate_set(part, seed=5).candidates(part) for part in groups), 1 / 7)


def outcome(module: Pretraining, config: RunConfig, targets: int | None) -> tuple[Tensor, tuple[float, ...]]:
    micro = micro_batch(config, targets)
    loss = module.double()(micro)
    loss.backward()
    bias = torch.linspace(-2, 2, config.model.vocab_size, dtype=torch.float64)
    with torch.no_grad():
        scores = module(EvaluationRequest((micro.batch,), bias))
    return loss.detach(), (scores.loss, scores.correct, scores.targets)


Outcome = tuple[Tensor, tuple[float, ...], dict[str, Tensor]]
"""Loss, scores and gradients."""


def one_rank(config: RunConfig, targets: int | None) -> Outcome:
    module = initialized(config)
    loss, scores = outcome(module, config, targets)
    return loss, scores, {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def split_each(group: Group, config: RunConfig, each: tuple[int | None, ...]) -> list[Outcome]:
    return [split(group, config, targets) for targets in each]


def split(group: Group, config: RunConfig, targets: int | None) -> Outcome:
    module = initialized(config, group)
    loss, scores = outcome(module, config, targets)
    dims = shard_dims(module)
    grads = {}
    for name, p in module.named_parameters():
        assert p.grad is not None, name
        grads[name] = p.grad if name not in dims else torch.cat(group.all_gather(p.grad).unbind(), dims[name])
    return loss, scores, grads


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES.keys())
@pytest.mark.parametrize("size", [1, 2, long(4)])
def test_loss_gradients_and_scores_equal_one_rank(size: int, objective: dict[str, Any]) -> None:
    assert_equal_to_one_rank(size, config_of(objective), (None, 1, 0))


@pytest.mark.parametrize("objective", ["headless", "corrected", "mixed", "untied"])
@pytest.mark.parametrize("size", [2, long(4)])
def test_sequence_parallelism_equals_one_rank(size: int, objective: str) -> None:
    assert_equal_to_one_rank(size, config_of(OBJECTIVES[objective], sequence=size), (None, 0))


def assert_equal_to_one_rank(size: int, config: RunConfig, each: tuple[int | None, ...]) -> None:
    """With each number of targets (None: all)."""
    expected = [one_rank(config, targets) for targets in each]
    for outcomes in on_ranks(size, split_each, config, each):
        for targets, found, (loss, scores, grads) in zip(each, outcomes, expected, strict=True):
            split_loss, split_scores, split_grads = found
            torch.testing.assert_close(split_loss, loss, rtol=0, atol=1e-10, msg=lambda m, n=targets: f"{n}: {m}")
            assert split_scores == pytest.approx(scores, rel=1e-10), targets
            assert split_grads.keys() == grads.keys(), targets
            for name, grad in grads.items():
                said = lambda m, n=f"{targets} targets, {name}": f"{n}: {m}"  # noqa: E731
                torch.testing.assert_close(split_grads[name], grad, rtol=0, atol=1e-10, msg=said)


def initial_weights(group: Group, config: RunConfig) -> dict[str, Tensor]:
    module = initialized(config, group)
    dims = shard_dims(module)
    whole = {}
    for name, p in module.named_parameters():
        assert hasattr(p, "model_parallel") is (name in dims)
        whole[name] = p.detach() if name not in dims else torch.cat(group.all_gather(p.detach()).unbind(), dims[name])
    return whole


def test_initial_weights_do_not_depend_on_the_mesh() -> None:
    config = config_of({"name": "vanilla"})
    expected = {name: p.detach() for name, p in initialized(config).named_parameters()}
    for size in (2, 4):
        for weights in on_ranks(size, initial_weights, config):
            assert all(torch.equal(weights[name], value) for name, value in expected.items())


def dropped(group: Group, config: RunConfig) -> tuple[Tensor, Tensor]:
    """Hidden states, and what attention gave before its output projection, under dropout."""
    module = initialized(config, group)
    heads: list[Tensor] = []
    attention = module.backbone.get_submodule("blocks.0.attention.output")
    attention.register_forward_pre_hook(lambda _, inputs: heads.append(inputs[0].detach()))
    torch.manual_seed(9)
    hidden: Tensor = module.backbone(torch.zeros(4, 16, dtype=torch.int64))
    return hidden.detach(), heads[0]


def test_dropout_is_alike_on_the_residual_stream_and_apart_inside_attention() -> None:
    """All tokens are equal, hence all values: what differs between heads is the weights that were dropped."""
    config = config_of({"name": "headless"}, hidden_dropout=0.3, attention_dropout=0.5)
    (hidden0, heads0), (hidden1, heads1) = on_ranks(2, dropped, config)
    assert torch.equal(hidden0, hidden1)
    assert not torch.equal(heads0 == 0, heads1 == 0)


@pytest.mark.parametrize(
    ("tensor", "model", "sentence"),
    [
        (3, {}, "`parallel.tensor` must divide the model's num_heads (4), but is 3 instead."),
        (4, {"intermediate_size": 66}, "`parallel.tensor` must divide the model's intermediate_size (66), but is 4"),
        (4, {"vocab_multiple": 1}, "`parallel.tensor` must divide the model's padded vocabulary (47), but is 4"),
    ],
)
def test_a_model_that_does_not_split_evenly_is_refused(tensor: int, model: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigErrors) as caught:
        small_config(model={**MODEL, **model}, parallel={"tensor": tensor})
    assert sentence in str(caught.value)
