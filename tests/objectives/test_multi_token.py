"""Multi-token prediction: which targets a head has, that nothing leaks, and a whole model's loss by its definition."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megahead.config.auxiliaries import MultiTokenConfig
from megahead.config.run import RunConfig
from megahead.data.batch import Batch
from megahead.losses.contrastive import build_objective
from megahead.losses.softmax import candidate_loss_reference
from megahead.objectives.auxiliary import training_row_collator
from megahead.objectives.micro_batch import MicroBatch, documents_of
from megahead.objectives.multi_token import MultiToken
from megahead.objectives.pretraining import Pretraining
from support.initialized import initialized
from support.small_checkpoint import small_config

ROWS, LENGTH, HEADS, END = 4, 10, 3, 0


def config_of(objective: dict[str, Any], family: str = "gpt_neox", **data: Any) -> RunConfig:
    gemma = {"local_window": 4, "global_every": 2} if family == "gemma3" else {}
    return small_config(
        model={"family": family, "hidden_dropout": 0.0, "attention_dropout": 0.0, "max_positions": 32} | gemma,
        data={"end_token": END, "sequence_length": LENGTH, **data},
        objective=objective | {"multi_token": {"heads": HEADS, "weight": 0.5}},
    )


def test_several_heads_have_a_loss_each() -> None:
    sums = {"loss": 6.0, "count": 3.0, "loss_2": 4.0, "count_2": 2.0, "loss_3": 9.0, "count_3": 0.0}
    assert MultiTokenConfig(heads=2).means(sums) == {"loss": 2.0, "loss_2": 2.0, "loss_3": 9.0}
    assert MultiTokenConfig(heads=1).means(sums) == {"loss": 2.0}


def text_of() -> np.ndarray:
    """A row of one document, one of two, one of documents as short as a token, and one that ends early."""
    text = np.random.default_rng(0).integers(1, 61, (ROWS, LENGTH + 1))
    text[1, 5], text[2, [1, 2, 5, LENGTH]], text[3, 7:] = END, END, -1
    return text


def batch_of(config: RunConfig) -> Batch:
    return training_row_collator(config, []).batch(text_of(), range(ROWS))


def targets_by_hand(batch: Batch) -> list[list[tuple[int, int]]]:
    """For each head the positions it predicts from, and its targets: step by step through targets of the document."""
    next_token = dict(zip(batch.target_index_N.tolist(), batch.target_ids_N.tolist(), strict=True))
    place = documents_of(batch).positions_BT.expand(ROWS, LENGTH).flatten().tolist()
    found: list[list[tuple[int, int]]] = [[] for _ in range(HEADS)]
    for index in range(ROWS * LENGTH):
        for k in range(1, HEADS + 1):
            path = range(index, index + k + 1)
            together = all(i // LENGTH == index // LENGTH and i in next_token for i in path)
            if together and all(place[i] == place[index] + i - index for i in path):
                found[k - 1].append((index, next_token[index + k]))
    return found


DOCUMENTS = [
    {"isolate_documents": isolate, "boundary_targets": across} for isolate in (True, False) for across in (True, False)
]


@pytest.mark.parametrize("data", DOCUMENTS, ids=str)
def test_heads_have_the_targets_further_ahead_in_their_document(data: dict[str, bool]) -> None:
    batch = batch_of(config_of({}, **data))
    heads_N, rows = batch.auxiliary[batch.target_index_N], text_of()
    for k, expected in enumerate(targets_by_hand(batch), 1):
        has_target_N = heads_N >= k
        index, ids = batch.target_index_N[has_target_N] - k, batch.target_ids_N[has_target_N]
        assert list(zip(index.tolist(), ids.tolist(), strict=True)) == expected
        assert all(rows[i // LENGTH, i % LENGTH + k + 1] == target for i, target in expected)  # k + 1 ahead
    assert MultiToken.num_loss_terms(batch) == sum(map(len, targets_by_hand(batch)))


def micro_batch(config: RunConfig, groups: int) -> MicroBatch:
    batch, objective = batch_of(config), build_objective(config.objective, 61)
    group_N = batch.target_index_N // LENGTH // (ROWS // groups)
    parts = [batch.target_ids_N[group_N == group] for group in range(groups)]
    return MicroBatch(batch, tuple(objective.candidate_set(part).candidates(part) for part in parts), 0.25, 0.125)


def losses_by_hand(model: Pretraining, micro: MicroBatch) -> tuple[Tensor, Tensor]:
    """Of next tokens, and of the heads: each output alone against its group's rows, or against all of them."""
    batch, documents, table = micro.batch, documents_of(micro.batch), model.backbone.embedding.weight
    auxiliary = model.auxiliary
    assert isinstance(auxiliary, MultiToken)
    hidden_BTD = model.backbone(batch.input_ids_BT, documents)
    groups = len(micro.candidates)

    def loss(outputs_BTD: Tensor, index: int, target: int) -> Tensor:
        output_1D = outputs_BTD.flatten(0, 1)[index : index + 1]
        group = micro.candidates[index // LENGTH // (ROWS // groups)]
        if group.ids_U is None:
            weights = table if model.head is None else model.head.weight
            return F.cross_entropy(output_1D @ weights[:61].T, torch.tensor([target]))
        target_1 = (group.ids_U == target).nonzero()[0]
        one = type(group)(group.ids_U, group.bias_U, target_1, group.as_target_bias_U)
        return candidate_loss_reference(output_1D, table[group.ids_U], one)

    nexts = zip(batch.target_index_N.tolist(), batch.target_ids_N.tolist(), strict=True)
    of_next = torch.stack([loss(hidden_BTD, index, target) for index, target in nexts]).sum()
    of_heads = hidden_BTD.sum() * 0
    arguments = model.backbone.block_arguments(documents)[-1]
    for block, pairs in zip(auxiliary.blocks, targets_by_hand(batch), strict=True):
        outputs_BTD = auxiliary.norm(block(hidden_BTD, *arguments))
        of_heads = of_heads + sum(loss(outputs_BTD, index, target) for index, target in pairs)
    return of_next, of_heads


@pytest.mark.parametrize(
    ("objective", "family", "groups"),
    [
        ({}, "gpt_neox", 1),
        ({}, "llama", 2),
        ({}, "gpt2", 4),
        ({"bias": "own_once"}, "gemma3", 2),
        ({"name": "vanilla", "tied": True}, "gpt_neox", 1),
        ({"name": "vanilla"}, "llama", 1),
    ],
    ids=str,
)
def test_the_loss_is_that_of_next_tokens_and_of_tokens_further_ahead(
    objective: dict[str, Any], family: str, groups: int
) -> None:
    config = config_of(objective, family)
    model, slow = (initialized(config).double() for _ in range(2))
    micro, noted = micro_batch(config, groups), list[Mapping[str, Tensor]]()
    model.on_metrics = noted.append
    loss = model(micro)
    of_next, of_heads = losses_by_hand(slow, micro)
    expected = 0.25 * of_next + 0.125 * 0.5 * of_heads
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0)
    loss.backward()
    expected.backward()
    for (name, mine), theirs in zip(model.named_parameters(), slow.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-10, msg=name)
    counts = [len(pairs) for pairs in targets_by_hand(micro.batch)]
    assert [int(noted[0][f"count_{k + 2}"]) for k in range(HEADS)] == counts
    assert int(noted[0]["count"]) == sum(counts)
    assert noted[0]["loss"].item() == pytest.approx(of_heads.item(), rel=1e-9)


def test_no_head_sees_a_later_token_or_another_document() -> None:
    config = config_of({})
    model, batch = initialized(config).double(), batch_of(config)
    documents, auxiliary = documents_of(batch), model.auxiliary
    assert isinstance(auxiliary, MultiToken)
    inputs_BTD = model.backbone.embed(batch.input_ids_BT).detach().requires_grad_()
    hidden_BTD = model.backbone.encode(inputs_BTD, documents)
    for k in range(1, HEADS + 1):
        outputs_MD = auxiliary.outputs(k, hidden_BTD, documents, model.backbone).flatten(0, 1)
        for index in range(ROWS * LENGTH):
            (gradient,) = torch.autograd.grad(outputs_MD[index].square().sum(), inputs_BTD, retain_graph=True)
            first = index - int(documents.positions_BT.flatten()[index])
            reached = (gradient.flatten(0, 1).abs().sum(-1) > 0).nonzero().flatten().tolist()
            assert reached == list(range(first, index + 1))


def test_documents_of_one_token_have_a_loss_of_zero_connected_to_all_weights() -> None:
    config = config_of({})
    model = initialized(config)
    batch = training_row_collator(config, []).batch(np.full((2, LENGTH + 1), END), range(2))
    candidates = build_objective(config.objective, 61).candidate_set(batch.target_ids_N).candidates(batch.target_ids_N)
    noted = list[Mapping[str, Tensor]]()
    model.on_metrics = noted.append
    model(MicroBatch(batch, (candidates,), 1.0, 1.0)).backward()
    assert noted[0]["loss"].item() == noted[0]["count"].item() == 0
    assert all(parameter.grad is not None for parameter in model.parameters())
