"""TSDAE: what its encoder and its decoder read, and a whole model's loss by its definition."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megahead.config.run import RunConfig
from megahead.data.batch import Batch
from megahead.data.samples import CounterRng, Purpose
from megahead.losses.contrastive import build_objective
from megahead.models.documents import Documents
from megahead.objectives.auxiliary import training_row_collator
from megahead.objectives.micro_batch import MicroBatch
from megahead.objectives.pretraining import Pretraining
from megahead.objectives.retromae import TSDAE, earlier_tokens
from support.initialized import initialized
from support.small_checkpoint import small_config
from support.text_decoders import assert_equal_with_gradients, decoded, in_groups, loss_among

ROWS, LENGTH, END = 4, 20, 2
TEXTS = (range(1, 19), range(1, 9), range(1, 13), range(1, 19))
"""Of each row's first document the places of the text, without [CLS] and ends."""


def config_of(objective: dict[str, Any], family: str = "bert", **masking: Any) -> RunConfig:
    dropouts = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return small_config(
        model={"family": family, "num_layers": 2, "max_positions": 32, **dropouts},
        data={"end_token": END, "sequence_length": LENGTH},
        masking={"mask_token": 3, "cls_token": 1, "sep_token": 4, "rate": 0.2} | masking,
        objective=objective,
    )


TSDAE_SETTINGS = {"tsdae": {"weight": 0.5, "deletion_rate": 0.6}}


def text_of() -> np.ndarray[Any, Any]:
    """The second row has two documents, the third ends early."""
    text = np.random.default_rng(0).integers(5, 61, (ROWS, LENGTH - 2))
    text[1, 8], text[2, 12:] = END, -1
    return text


def batch_of(config: RunConfig) -> Batch:
    return training_row_collator(config, []).batch(text_of(), range(ROWS))


def read_by_hand(objective: dict[str, Any], family: str) -> list[list[list[tuple[int, int]]]]:
    """For each document of each row, the (place, id) that its encoder reads: a run's that deletes nothing, less those
    whose number is small."""
    config, rows = config_of(objective, family), []
    batch, draws = batch_of(config), CounterRng(config.seed, range(ROWS)).uniform(Purpose.TSDAE, LENGTH)
    for row, ids in enumerate(batch.input_ids_BT.tolist()):
        masked = {index % LENGTH for index in batch.target_index_N.tolist() if index // LENGTH == row}
        gone = {place for place in TEXTS[row] if draws[row, place] < 0.6} - masked
        assert 0 < len(gone) < len(TEXTS[row])
        pairs = [(place, id_) for place, id_ in enumerate(ids) if place not in gone]
        cut = 10 if row == 1 else 14 if row == 2 else LENGTH
        rows.append([[pair for pair in pairs if pair[0] < cut], [pair for pair in pairs if pair[0] >= cut]])
    return rows


def loss_by_hand(
    model: Pretraining, micro: MicroBatch, objective: dict[str, Any], family: str
) -> tuple[Tensor, Tensor]:
    """Of masked tokens, and of the decoder's; each document is encoded alone, the text decoded token by token."""
    plain, table = batch_of(config_of(objective, family)), model.backbone.embedding.weight
    text = plain.input_ids_BT.flatten().index_copy(0, plain.target_index_N, plain.target_ids_N).view(ROWS, LENGTH)
    hidden, outputs = dict[int, Tensor](), []
    for row, documents in enumerate(read_by_hand(objective, family)):
        for document in filter(None, documents):
            places, ids = zip(*document, strict=True)
            (states,) = model.backbone(torch.tensor([ids]), Documents.whole_rows(1, len(ids)))
            hidden |= {row * LENGTH + place: state for place, state in zip(places, states, strict=True)}
    for row, places in enumerate(TEXTS):
        assert isinstance(model.auxiliary, TSDAE)
        embeddings, first = table[text[row]], hidden[row * LENGTH]
        outputs += [decoded(model.auxiliary.decoder, first, embeddings, i, range(1, i)) for i in places]
    masked = torch.stack([hidden[index] for index in plain.target_index_N.tolist()])
    own = loss_among(model, torch.stack(outputs), micro.auxiliary_candidates)
    return loss_among(model, masked, micro.candidates), own


@pytest.mark.parametrize(
    ("objective", "family"),
    [({}, "bert"), ({}, "modernbert"), ({"name": "vanilla", "tied": True}, "bert")],
    ids=str,
)
def test_the_loss_is_that_of_masked_tokens_and_of_all_tokens_by_the_decoder(
    objective: dict[str, Any], family: str
) -> None:
    config, noted = config_of(objective | TSDAE_SETTINGS, family), list[Mapping[str, Tensor]]()
    model, slow = (initialized(config).double() for _ in range(2))
    micro = in_groups(batch_of(config), config)
    model.on_metrics = noted.append
    loss = model(micro)
    of_encoder, of_decoder = loss_by_hand(slow, micro, objective, family)
    expected = 0.25 * of_encoder + 0.125 * 0.5 * of_decoder
    assert_equal_with_gradients(loss, model, expected, slow)
    assert noted[0]["loss"].item() == pytest.approx(of_decoder.item(), rel=1e-9)
    assert int(noted[0]["count"]) == sum(map(len, TEXTS))


def test_rows_keep_what_is_not_deleted_and_end_with_a_document_of_end_tokens() -> None:
    batch, plain = batch_of(config_of(TSDAE_SETTINGS)), batch_of(config_of({}))
    places = []
    for row, (first, second) in enumerate(read_by_hand({}, "bert")):
        kept = [*first, *second]
        filled = LENGTH - len(kept)
        assert batch.input_ids_BT[row].tolist() == [*(id_ for _, id_ in kept), *[END] * filled]
        assert batch.positions_BT is not None
        assert batch.positions_BT[row].tolist() == [*range(len(first)), *range(len(second)), *range(filled)]
        places += [row * LENGTH + place for place, _ in kept]
    moved = [places.index(index) for index in plain.target_index_N.tolist()]  # among all that is kept
    ends = np.cumsum([sum(map(len, row)) for row in read_by_hand({}, "bert")])
    rows, columns = np.divmod(batch.target_index_N.numpy(), LENGTH)
    assert (columns + np.where(rows > 0, ends[rows - 1], 0)).tolist() == moved
    assert torch.equal(batch.target_ids_N, plain.target_ids_N)
    index_P, ids_P = batch.auxiliary.targets
    assert index_P.tolist() == [row * LENGTH + place for row, text in enumerate(TEXTS) for place in text]
    assert ids_P.tolist() == [text_of()[row, place - 1] for row, text in enumerate(TEXTS) for place in text]


def test_the_share_that_is_deleted_is_that_of_tokens_that_are_not_masked() -> None:
    config = config_of({"tsdae": {"deletion_rate": 0.3}}, rate=0.5)
    batch = training_row_collator(config, []).batch(np.full((2000, LENGTH - 2), 9), range(2000))
    assert (batch.input_ids_BT == END).double().sum(1).mean().item() == pytest.approx(0.3 * 9, rel=0.02)
    assert len(batch.target_ids_N) == 2000 * 9


def test_draws_belong_to_the_samples() -> None:
    collator = training_row_collator(config_of(TSDAE_SETTINGS), [])
    whole, half = collator.batch(text_of(), range(ROWS)), collator.batch(text_of()[2:], range(2, ROWS))
    assert torch.equal(whole.input_ids_BT[2:], half.input_ids_BT)
    assert not torch.equal(whole.input_ids_BT, collator.batch(text_of(), range(ROWS, 2 * ROWS)).input_ids_BT)


def test_layers_without_mask_tokens_read_what_is_left() -> None:
    late = {"rate": 0.4, "masks_from_layer": 1, "random_share": 0.0, "mask_share": 1.0}
    batch = batch_of(config_of(TSDAE_SETTINGS, **late))
    (subset,) = batch.token_subsets
    read = batch.input_ids_BT.flatten()[subset.index_N]
    others = [id_ for row in batch.input_ids_BT.tolist() for id_ in row if id_ not in (3, END)]
    assert read[read != END].tolist() == others
    assert int(np.bincount(subset.index_N.numpy() // LENGTH).max()) <= subset.max_per_row


def test_a_position_learns_from_cls_and_earlier_tokens_alone() -> None:
    model = initialized(config_of(TSDAE_SETTINGS)).double()
    assert isinstance(model.auxiliary, TSDAE)
    first, text = (torch.randn(*size, 48, dtype=torch.float64, requires_grad=True) for size in ((2,), (2, 9)))
    for index in range(10, 18):
        outputs = model.auxiliary.decoder(first, text, earlier_tokens(9, text.device), torch.tensor([index]))
        of_first, of_text = torch.autograd.grad(outputs.square().sum(), (first, text))
        assert (of_first.abs().sum(-1) > 0).tolist() == [False, True]
        reached = of_text.abs().sum(-1) > 0
        assert not reached[0].any()
        assert reached[1].nonzero().flatten().tolist() == [*range(1, index - 9)]


@pytest.mark.parametrize("deletion_rate", [0.6, 0.999999999])
def test_a_batch_of_special_tokens_or_of_deleted_ones_has_a_loss_connected_to_all_weights(deletion_rate: float) -> None:
    config = config_of({"tsdae": {"deletion_rate": deletion_rate}})
    model, collator = initialized(config), training_row_collator(config, [])
    batch = collator.batch(np.full((2, LENGTH - 2), END if deletion_rate == 0.6 else 9), range(2))
    rule = build_objective(config.objective, 61)
    groups = [(rule.candidate_set(ids).candidates(ids),) for ids in (batch.target_ids_N, batch.auxiliary.targets.ids_P)]
    loss = model(MicroBatch(batch, groups[0], 1.0, 1.0, groups[1]))
    loss.backward()
    assert loss.isfinite()
    assert all(parameter.grad is not None for parameter in model.parameters())
