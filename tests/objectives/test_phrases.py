"""Phrases as candidates in a whole model: the loss and its gradients by its definition."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megahead.config.run import RunConfig
from megahead.losses.contrastive import build_objective
from megahead.objectives.auxiliary import training_row_collator
from megahead.objectives.micro_batch import MicroBatch, documents_of
from megahead.objectives.pretraining import Pretraining
from support.initialized import initialized
from support.small_checkpoint import small_config

PHRASES = {"group_samples": 2, "longest": 2, "weight": 0.5}


def config_of(objective: dict[str, Any], family: str) -> RunConfig:
    dropouts = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return small_config(
        model={"family": family, "num_layers": 2, "max_positions": 32, **dropouts},
        data={"end_token": 2, "sequence_length": 16},
        masking={"mask_token": 3, "cls_token": 1, "sep_token": 2, "rate": 0.4},
        objective=objective,
    )


def micro_batch(config: RunConfig) -> MicroBatch:
    collator = training_row_collator(config, [])
    batch = collator.batch(np.random.default_rng(0).integers(4, 7, (8, 14)), range(8))
    candidates = build_objective(config.objective, 61).candidate_set(batch.target_ids_N).candidates(batch.target_ids_N)
    return MicroBatch(batch, (candidates,), 0.25)


def by_hand(model: Pretraining, micro: MicroBatch, temperature: float) -> Tensor:
    """End by end, from the outputs of all tokens."""
    hidden = model.backbone(micro.batch.input_ids_BT, documents_of(micro.batch)).flatten(0, 1)
    total = hidden.sum() * 0
    for group in micro.batch.auxiliary:
        candidates = group.candidates_K
        for q, end in enumerate(group.ends_Q.tolist()):
            right = candidates[[k for k in group.positives_QR[q].tolist() if k >= 0]]
            others = candidates[candidates // 16 != end // 16]
            above, below = (torch.exp(hidden[places] @ hidden[end] / temperature).sum() for places in (right, others))
            total = total - torch.log(above / below)
    return total


@pytest.mark.parametrize("family", ["bert", "modernbert"])
@pytest.mark.parametrize(("objective", "temperature"), [({}, None), ({"name": "vanilla"}, 3.0)], ids=str)
def test_the_loss_is_that_of_the_targets_and_of_both_ends_of_phrases(
    objective: dict[str, Any], temperature: float | None, family: str
) -> None:
    config = config_of(objective | {"phrases": PHRASES | {"temperature": temperature}}, family)
    model, slow = (initialized(each).double() for each in (config, config_of(objective, family)))
    micro, noted = micro_batch(config), list[Mapping[str, Tensor]]()
    model.on_metrics = noted.append
    bare = replace(micro, batch=replace(micro.batch, auxiliary=()))
    loss, expected = model(micro), slow(bare) + 0.25 * 0.5 * by_hand(slow, micro, temperature or 48**0.5)
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0)
    loss.backward()
    expected.backward()
    for (name, mine), theirs in zip(model.named_parameters(), slow.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-10, msg=name)
    assert int(noted[0]["ends"]) == sum(len(group.ends_Q) for group in micro.batch.auxiliary) > 4


def test_a_phrase_of_more_tokens_than_a_row_has_targets_is_masked_in_parts() -> None:
    """Ten tokens, where rows have six targets: whole it would fit into none."""
    config = config_of({"phrases": PHRASES | {"longest": 10}}, "bert")
    text = np.concatenate([np.arange(4, 4 + 32).reshape(8, 4), np.tile(np.arange(40, 50), (8, 1))], 1)
    groups = training_row_collator(config, []).batch(text, range(8)).auxiliary
    assert sum(len(group.ends_Q) for group in groups) > 0
