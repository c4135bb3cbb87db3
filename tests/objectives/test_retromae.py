"""RetroMAE: what its decoder sees, that nothing leaks from a target, and a whole model's loss by its definition."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megahead.config.run import RunConfig
from megahead.data.batch import Batch
from megahead.losses.contrastive import build_objective
from megahead.objectives.auxiliary import training_row_collator
from megahead.objectives.micro_batch import MicroBatch, documents_of
from megahead.objectives.pretraining import Pretraining
from megahead.objectives.retromae import RetroMAE, visible_tokens
from support.initialized import initialized
from support.small_checkpoint import small_config
from support.text_decoders import assert_equal_with_gradients, decoded, in_groups, loss_among

ROWS, LENGTH = 4, 12
TEXTS = (range(1, 11), range(13, 18), range(25, 32), range(37, 47))
"""Places without [CLS], ends, and the second document."""


def config_of(objective: dict[str, Any], family: str = "bert", bag_weight: float = 0.0) -> RunConfig:
    dropouts = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return small_config(
        model={"family": family, "num_layers": 2, "max_positions": 32, **dropouts},
        data={"end_token": 2, "sequence_length": LENGTH},
        masking={"mask_token": 3, "cls_token": 1, "sep_token": 2, "rate": 0.3},
        objective=objective | {"retromae": {"weight": 0.5, "decoder_rate": 0.6, "bag_weight": bag_weight}},
    )


def batch_of(config: RunConfig) -> Batch:
    """The second row has two documents, the third ends early."""
    text = np.random.default_rng(0).integers(4, 61, (ROWS, LENGTH - 2))
    text[1, 5], text[2, 7:] = 2, -1
    return training_row_collator(config, []).batch(text, range(ROWS))


def decoder_of(model: Pretraining) -> Any:
    assert isinstance(model.auxiliary, RetroMAE)
    return model.auxiliary.decoder


def visible_of(batch: Batch, row: int, position: int, rate: float) -> list[int]:
    """The other tokens that a position sees, by the draws."""
    draws, shift = batch.auxiliary.draws_BT[row].tolist(), int(batch.auxiliary.shifts_BT[row, position])
    documents = documents_of(batch).positions_BT.expand(ROWS, LENGTH)[row].tolist()
    limit = round(256 * (1 - rate))
    in_document = [j for j in range(1, LENGTH) if documents[j] == j]
    return [j for j in in_document if j != position and (draws[j] + shift) % 256 < limit]


def outputs_by_hand(model: Pretraining, batch: Batch) -> Tensor:
    """[P, D]: position by position, over the tokens that it sees."""
    hidden_BTD = model.backbone(batch.input_ids_BT, documents_of(batch))
    text = batch.input_ids_BT.flatten().index_copy(0, batch.target_index_N, batch.target_ids_N).view(ROWS, LENGTH)
    outputs = []
    for row, i in (divmod(index, LENGTH) for index in batch.auxiliary.targets.index_P.tolist()):
        embeddings, seen = model.backbone.embedding.weight[text[row]], visible_of(batch, row, i, 0.6)
        outputs.append(decoded(decoder_of(model), hidden_BTD[row, 0], embeddings, i, seen))
    return torch.stack(outputs)


def bag_by_hand(model: Pretraining, micro: MicroBatch) -> Tensor:
    """Of the sets of tokens: the groups' biases are those of all their ids, each once in a group."""
    batch = micro.batch
    hidden = model.backbone(batch.input_ids_BT, documents_of(batch)).flatten(0, 1)
    text = batch.input_ids_BT.flatten().index_copy(0, batch.target_index_N, batch.target_ids_N)
    table, total = model.backbone.embedding.weight, hidden.sum() * 0
    for row, places in enumerate(TEXTS):
        group = micro.auxiliary_candidates[row // 2]
        if group.ids_U is None:
            assert model.mask_head is not None
            scores = model.mask_head(hidden[places]) @ table[:61].T + model.mask_head.bias[:61]
            logs = scores.amax(0).log_softmax(0)
        else:
            assert group.bias_U is not None
            largest = (hidden[places] @ table.T).amax(0)
            logs = largest - (largest[group.ids_U] + group.bias_U).logsumexp(0)
        total = total - logs[text[places].unique()].sum()
    return total


def loss_by_hand(model: Pretraining, micro: MicroBatch) -> tuple[Tensor, Tensor]:
    """Of masked tokens, and of the decoder's."""
    batch = micro.batch
    hidden = model.backbone(batch.input_ids_BT, documents_of(batch)).flatten(0, 1)
    of_encoder = loss_among(model, hidden[batch.target_index_N], micro.candidates)
    return of_encoder, loss_among(model, outputs_by_hand(model, batch), micro.auxiliary_candidates)


@pytest.mark.parametrize(
    ("objective", "family"),
    [({}, "bert"), ({}, "modernbert"), ({"name": "vanilla", "tied": True}, "bert")],
    ids=str,
)
def test_the_loss_is_that_of_masked_tokens_and_of_all_tokens_by_the_decoder(
    objective: dict[str, Any], family: str
) -> None:
    config = config_of(objective, family)
    model, slow = (initialized(config).double() for _ in range(2))
    micro, noted = in_groups(batch_of(config), config), list[Mapping[str, Tensor]]()
    model.on_metrics = noted.append
    loss = model(micro)
    of_encoder, of_decoder = loss_by_hand(slow, micro)
    expected = 0.25 * of_encoder + 0.125 * 0.5 * of_decoder
    assert_equal_with_gradients(loss, model, expected, slow)
    assert noted[0]["loss"].item() == pytest.approx(of_decoder.item(), rel=1e-9)
    assert int(noted[0]["count"]) == len(micro.batch.auxiliary.targets.ids_P)


@pytest.mark.parametrize(
    ("objective", "family"),
    [({}, "modernbert"), ({"name": "vanilla", "tied": True}, "bert")],
    ids=str,
)
def test_the_tokens_outputs_also_predict_the_set_of_their_text(objective: dict[str, Any], family: str) -> None:
    config, noted = config_of(objective, family, bag_weight=0.7), list[Mapping[str, Tensor]]()
    model, slow = (initialized(config).double() for _ in range(2))
    micro = in_groups(batch_of(config), config)
    model.on_metrics = noted.append
    loss = model(micro)
    (of_encoder, of_decoder), of_bag = loss_by_hand(slow, micro), bag_by_hand(slow, micro)
    expected = 0.25 * of_encoder + 0.125 * (0.5 * of_decoder + 0.7 * of_bag)
    assert_equal_with_gradients(loss, model, expected, slow)
    assert config.objective.retromae is not None
    means = config.objective.retromae.means({name: value.item() for name, value in noted[0].items()})
    count = sum(map(len, TEXTS))
    assert means == pytest.approx({"loss": of_decoder.item() / count, "bag": of_bag.item() / count})


def test_a_share_of_vanilla_is_one_of_the_bag() -> None:
    """Each part alone has the loss of the mixture at a share of 0 or 1."""
    bags = []
    for share in (0.0, 0.3, 1.0):
        config = config_of({"vanilla_weight": 0.3}, bag_weight=1.0)
        model, noted = initialized(config).double(), list[Mapping[str, Tensor]]()
        model.objective = config.objective.model_copy(update={"vanilla_weight": share})
        model.on_metrics = noted.append
        model(in_groups(batch_of(config), config))
        bags.append(noted[0]["bag"].item())
    headless, mixed, vanilla = bags
    assert abs(headless - vanilla) > 0.1
    assert mixed == pytest.approx(0.7 * headless + 0.3 * vanilla)


def test_targets_are_all_tokens_of_the_first_document_whether_masked_or_not() -> None:
    batch = batch_of(config_of({}))
    index_P, ids_P = batch.auxiliary.targets
    text_M = batch.input_ids_BT.flatten().index_copy(0, batch.target_index_N, batch.target_ids_N)
    assert index_P.tolist() == [index for row in TEXTS for index in row]
    assert torch.equal(ids_P, text_M[index_P])
    assert set(batch.target_index_N.tolist()) & set(index_P.tolist())


def test_each_position_sees_a_set_of_its_own_but_never_itself() -> None:
    draws, shifts = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, 300, 64), np.uint8))
    in_document = torch.ones(300, 64, dtype=torch.bool)
    in_document[:, 50:] = False
    mask = visible_tokens(draws, shifts, in_document, 64)
    assert mask[:, :, 0].all()
    assert not mask[:, range(1, 64), range(1, 64)].any()
    assert not mask[:, :, 50:].any()
    others = ~torch.eye(64, dtype=torch.bool)
    shares = mask.double().mean(0)[:, 1:50]  # of each pair over the rows
    assert shares[others[:, 1:50]].mean() == pytest.approx(0.25, abs=0.005)
    assert shares[others[:, 1:50]].std() == pytest.approx((0.25 * 0.75 / 300) ** 0.5, rel=0.1)
    sizes = mask[:, 51:, 1:50].sum(-1).double()  # of one position: 49 independent draws
    assert sizes.var() == pytest.approx(49 * 0.25 * 0.75, rel=0.1)
    assert (mask[:, 51] != mask[:, 52]).any(-1).double().mean() > 0.95


def test_nothing_leaks_from_the_targets_position() -> None:
    config = config_of({})
    decoder, batch = decoder_of(initialized(config).double()), batch_of(config)
    first_BD, text_BTD = (torch.randn(*size, 48, dtype=torch.float64) for size in ((ROWS,), (ROWS, LENGTH)))
    text_BTD.requires_grad_()
    in_document_BT = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    mask = visible_tokens(batch.auxiliary.draws_BT, batch.auxiliary.shifts_BT, in_document_BT, 102)
    for index in range(LENGTH + 1, 2 * LENGTH):
        (output_1D,) = decoder(first_BD, text_BTD, mask, torch.tensor([index]))
        (gradient,) = torch.autograd.grad(output_1D.square().sum(), text_BTD)
        reached = gradient.abs().sum(-1) > 0
        assert not reached[[0, 2, 3]].any()
        seen = mask[1, index - LENGTH].clone()
        seen[0] = False  # the hidden state of [CLS] is read in place of its embedding
        assert torch.equal(reached[1], seen)
        assert not reached[1, index - LENGTH]


def test_draws_belong_to_the_samples() -> None:
    config = config_of({})
    collator, text = training_row_collator(config, []), np.random.default_rng(0).integers(4, 61, (4, LENGTH - 2))
    whole, half = collator.batch(text, range(4)).auxiliary, collator.batch(text[2:], range(2, 4)).auxiliary
    assert torch.equal(whole.draws_BT[2:], half.draws_BT)
    assert torch.equal(whole.shifts_BT[2:], half.shifts_BT)
    assert len({tuple(row) for row in torch.cat([whole.draws_BT, whole.shifts_BT]).tolist()}) == 8


@pytest.mark.parametrize("bag_weight", [0.0, 1.0])
def test_a_batch_of_special_tokens_alone_has_a_loss_of_zero_connected_to_all_weights(bag_weight: float) -> None:
    config = config_of({}, bag_weight=bag_weight)
    model, collator = initialized(config), training_row_collator(config, [])
    batch = collator.batch(np.full((2, LENGTH - 2), 2), range(2))
    none = build_objective(config.objective, 61).candidate_set(batch.target_ids_N).candidates(batch.target_ids_N)
    loss = model(MicroBatch(batch, (none,), 1.0, 1.0, (none,)))
    loss.backward()
    assert loss.item() == 0
    assert all(parameter.grad is not None for parameter in model.parameters())
