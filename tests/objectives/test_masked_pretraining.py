"""Encoders learning by masking: BERT's own loss for vanilla, the last block at the targets alone, no target at all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from megahead.config.run import RunConfig
from megahead.data.loader import training_collator
from megahead.losses.contrastive import build_objective
from megahead.objectives.micro_batch import EvaluationRequest, MicroBatch, documents_of
from megahead.objectives.pretraining import Pretraining
from support.initialized import initialized
from support.small_checkpoint import small_config

CPU = torch.device("cpu")
MODEL = {"family": "bert", "token_types": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0, "max_positions": 32}
MASKING = {"mask_token": 3, "cls_token": 1, "sep_token": 2}
MASKS: dict[str, dict[str, Any]] = {
    "fixed": {"rate": 0.3},
    "bernoulli": {"rate": 0.3, "count": "bernoulli"},
    "diffusion": {"diffusion": True},
}
OBJECTIVES = {
    "headless": {"name": "headless"},
    "learned": {"learned_temperature": True, "temperature": 0.5},
    "vanilla": {"name": "vanilla", "tied": True},
    "untied": {"name": "vanilla", "temperature": 0.5},
    "mixed": {"vanilla_weight": 0.3, "learned_temperature": True},
}


def config_of(objective: dict[str, Any], activation: str = "gelu", masks: str = "fixed") -> RunConfig:
    return small_config(
        model={**MODEL, "activation": activation},
        data={"end_token": 2, "sequence_length": 16, "isolate_documents": True},
        masking=MASKING | MASKS[masks],
        objective=objective,
    )


def micro_batch(config: RunConfig, text: np.ndarray | None = None) -> MicroBatch:
    collator = training_collator(config, [])
    assert collator is not None
    text = np.random.default_rng(0).integers(2, 61, (4, 14)) if text is None else text
    batch = collator.batch(text, range(len(text)))
    objective = build_objective(config.objective, config.model.vocab_size, torch.ones(config.model.vocab_size))
    candidates = objective.candidate_set(batch.target_ids_N).candidates(batch.target_ids_N, batch.weight_N)
    return MicroBatch(batch, (candidates,), 0.25)


def random_model(config: RunConfig) -> Pretraining:
    model, generator = initialized(config).double(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def whole(micro: MicroBatch) -> MicroBatch:
    """The same without a bound on a row's targets: every block is computed for all positions."""
    return replace(micro, batch=replace(micro.batch, max_targets_per_row=None))


def outcome(model: Pretraining, micro: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(micro)
    loss.backward()
    grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return loss.detach(), grads


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES.keys())
def test_the_last_block_at_the_targets_alone_changes_nothing(objective, padded, masks) -> None:
    config = config_of(objective, masks=masks)
    text = np.random.default_rng(1).integers(2, 61, (4, 14))
    if padded:
        text[1, 9:] = text[2, 3:] = -1
    micro = micro_batch(config, text)
    model = random_model(config)
    loss, grads = outcome(model, micro)
    full_loss, full_grads = outcome(model, whole(micro))
    torch.testing.assert_close(loss, full_loss, rtol=0, atol=1e-11)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, full_grads[name], rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize(
    ("tied", "activation", "masks"),
    [(True, "gelu", "fixed"), (False, "gelu_tanh", "fixed"), (True, "gelu", "diffusion")],
)
def test_vanilla_is_berts_own_loss(tied: bool, activation: str, masks: str) -> None:
    config = config_of({"name": "vanilla", "tied": tied}, activation, masks)
    micro, model = micro_batch(config), random_model(config)
    loss, grads = outcome(model, micro)
    batch, head = micro.batch, model.mask_head
    model.zero_grad()
    hidden_ND = model.backbone(batch.input_ids_BT, documents_of(batch)).flatten(0, 1)[batch.target_index_N]
    matrix = model.backbone.embedding.weight if model.head is None else model.head.weight
    bent_ND = F.gelu(head.dense(hidden_ND), approximate="tanh" if activation == "gelu_tanh" else "none")
    transformed = F.layer_norm(bent_ND, (48,), head.norm.weight, head.norm.bias, 1e-12)
    logits = (transformed @ matrix.T + head.bias)[:, :61]
    weight_N = torch.ones(len(logits)) if batch.weight_N is None else batch.weight_N
    expected = (weight_N * F.cross_entropy(logits, batch.target_ids_N, reduction="none")).sum()
    torch.testing.assert_close(loss, expected.detach() * 0.25, rtol=0, atol=1e-10)
    (expected * 0.25).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=0, atol=1e-10, msg=name)
    scores = model(EvaluationRequest((batch,), None))
    assert scores.loss == pytest.approx(expected.item())
    assert scores.correct == int((logits.argmax(1) == batch.target_ids_N).sum())


def test_biases_alike_for_all_tokens_change_nothing_in_half_precision() -> None:
    """Own biases are added up over all targets: rounded to eight bits, their sum would be far off."""
    config = config_of({"name": "vanilla", "tied": True})
    micro = micro_batch(config, np.random.default_rng(0).integers(2, 61, (5, 14)))
    model = initialized(config).bfloat16()
    losses = []
    for bias in (0.0, 7.0625):
        torch.nn.init.constant_(model.mask_head.bias, bias)
        losses.append(model(micro))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES.keys())
def test_without_targets_the_loss_is_zero_and_reaches_every_weight(objective) -> None:
    config = config_of(objective)
    loss, grads = outcome(random_model(config), micro_batch(config, np.full((2, 14), -1)))
    assert loss == 0
    assert not any(grad.any() for grad in grads.values())


def test_a_headless_encoder_has_no_transform() -> None:
    names = [name for name, _ in initialized(config_of({})).named_parameters()]
    assert not [name for name in names if not name.startswith("backbone.")]
