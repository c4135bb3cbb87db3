"""Replaced-token detection: the loss by its definition, what learns from which part of it, and what is replaced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megahead.config.objective import ObjectiveConfig
from megahead.config.run import RunConfig
from megahead.losses.contrastive import build_objective
from megahead.objectives.auxiliary import training_row_collator
from megahead.objectives.micro_batch import EvaluationRequest, MicroBatch, documents_of
from megahead.objectives.pretraining import Pretraining, initial_weights
from megahead.objectives.replaced_tokens import ReplacedTokens
from support.initialized import initialized
from support.small_checkpoint import small_config

OBJECTIVES: dict[str, dict[str, Any]] = {
    "headless": {},
    "corrected": {"bias": "corrected"},
    "vanilla": {"name": "vanilla", "tied": True},
    "untied": {"name": "vanilla"},
}
VOCABULARY = 61


def config_of(objective: dict[str, Any], family: str = "bert", weight: float = 50.0) -> RunConfig:
    dropouts = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return small_config(
        model={"family": family, "num_layers": 2, "max_positions": 32, **dropouts},
        data={"end_token": 2, "sequence_length": 16, "isolate_documents": True},
        masking={"mask_token": 3, "cls_token": 1, "sep_token": 2, "rate": 0.3},
        objective=objective | {"replaced_tokens": {"generator_layers": 1, "weight": weight}},
    )


def micro_batch(config: RunConfig, rows: int = 6, ids: range = range(2, VOCABULARY)) -> MicroBatch:
    collator = training_row_collator(config, [])
    text = np.random.default_rng(0).integers(ids.start, ids.stop, (rows, 14))
    batch = collator.batch(text, range(rows))
    rule = build_objective(config.objective, VOCABULARY, torch.arange(VOCABULARY) + 1)
    candidates = rule.candidate_set(batch.target_ids_N).candidates(batch.target_ids_N)
    return MicroBatch(batch, (candidates,), 0.25, 0.125)


def random_model(config: RunConfig) -> Pretraining:
    model, generator = initialized(config).double(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def watched(model: Pretraining, micro: MicroBatch) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
    """The loss; what the backbone read, [B, T, D]; what was noted."""
    read: list[Tensor] = []
    noted: list[Mapping[str, Tensor]] = []
    encode = model.backbone.encode
    model.backbone.encode = lambda rows, documents: read.append(rows) or encode(rows, documents)  # type: ignore
    model.on_metrics = noted.append
    loss = model(micro)
    model.backbone.encode = encode  # type: ignore[method-assign]
    return loss, read[0], noted[0]


def ids_of(rows: Tensor, model: Pretraining) -> Tensor:
    """The ids whose rows these are."""
    table = model.backbone.embedding.weight
    same_MV = (rows.detach().flatten(0, -2)[:, None] == table[:VOCABULARY]).all(-1)
    assert (same_MV.sum(1) == 1).all()
    return same_MV.int().argmax(1).view(rows.shape[:-1])


@pytest.mark.parametrize("family", ["bert", "modernbert"])
@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES.keys())
def test_the_loss_is_the_generators_and_that_of_what_was_replaced(objective: dict[str, Any], family: str) -> None:
    config = config_of(objective, family)
    model, micro = random_model(config), micro_batch(config)
    loss, read_BTD, noted = watched(model, micro)
    batch, detection = micro.batch, model.auxiliary
    assert isinstance(detection, ReplacedTokens)
    read_M, masked_M = ids_of(read_BTD, model).flatten(), batch.input_ids_BT.flatten()
    text_M = masked_M.index_copy(0, batch.target_index_N, batch.target_ids_N)
    replaced_M = read_M != text_M
    assert not replaced_M[np.setdiff1d(np.arange(len(text_M)), batch.target_index_N)].any()
    assert 0 < replaced_M.sum() <= len(batch.target_ids_N)
    hidden_BTD = model.backbone(read_M.view_as(batch.input_ids_BT), documents_of(batch))
    logits_M = detection.head(hidden_BTD.flatten(0, 1))
    classified_P = batch.auxiliary.classified_P
    by_hand = F.binary_cross_entropy_with_logits(
        logits_M[classified_P], replaced_M[classified_P].double(), reduction="sum"
    )
    alone = model._loss_of_targets(*_of_targets(model, micro))
    assert loss.item() == pytest.approx((0.25 * alone + 0.125 * 50 * by_hand).item(), rel=1e-9)
    assert noted["loss"].item() == pytest.approx(by_hand.item(), rel=1e-9)
    assert (int(noted["classified"]), int(noted["replaced"])) == (len(classified_P), int(replaced_M.sum()))


def _of_targets(model: Pretraining, micro: MicroBatch) -> tuple[Any, ...]:
    inputs_BTD, rows = model._embed_inputs_and_candidates(micro.batch.input_ids_BT, micro.candidates)
    outputs_ND = model._outputs(inputs_BTD, micro.batch)
    return outputs_ND, [(outputs_ND, rows[0], micro.candidates[0])], micro.batch


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES.keys())
def test_the_generator_learns_nothing_from_what_the_model_finds_and_all_else_learns(objective: dict[str, Any]) -> None:
    gradients = []
    for weight in (50.0, 1e-3):
        config = config_of(objective, weight=weight)
        model = random_model(config)
        model(micro_batch(config)).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradient is not None, name
        assert gradient.abs().sum() > 0 or name.endswith(("key.bias", "token_types.weight")), name
        if name.startswith(("detection.generator.", "mask_head.", "head.")):
            assert torch.equal(gradient, gradients[1][name]), name  # type: ignore[arg-type]
        else:
            assert not torch.equal(gradient, gradients[1][name]), name  # type: ignore[arg-type]


def test_only_candidates_of_a_tokens_own_group_replace_it() -> None:
    config = config_of({})
    model, micro = random_model(config), micro_batch(config)
    rule, counts = build_objective(config.objective, VOCABULARY), [0, 0]
    half = int((micro.batch.target_index_N < 3 * 16).sum())
    parts = micro.batch.target_ids_N.split([half, len(micro.batch.target_ids_N) - half])
    groups = tuple(rule.candidate_set(part).candidates(part) for part in parts)
    _, read_BTD, _ = watched(model, replace(micro, candidates=groups))
    drawn_N = ids_of(read_BTD, model).flatten()[micro.batch.target_index_N]
    for place, (part, drawn) in enumerate(zip(parts, drawn_N.split([len(part) for part in parts]), strict=True)):
        assert torch.isin(drawn, part).all()
        counts[place] = int((drawn != part).sum())
    assert min(counts) > 0


def test_all_ids_are_drawn_from_where_asked() -> None:
    """With a bias that leaves one id alone, no target's, all targets become it."""
    config = config_of({})
    all_ids = {"generator_layers": 1, "draws": "vocabulary"}
    config = config.model_copy(update={"objective": ObjectiveConfig(**{"replaced_tokens": all_ids})})
    model, micro = random_model(config), micro_batch(config, ids=range(20, VOCABULARY))
    assert model.auxiliary is not None
    model.auxiliary.training_free_bias_V = torch.full((VOCABULARY,), -1e6, dtype=torch.float64).index_fill(
        0, torch.tensor([17]), 0.0
    )
    loss, read_BTD, noted = watched(model, micro)
    loss.backward()
    drawn_N = ids_of(read_BTD, model).flatten()[micro.batch.target_index_N]
    assert drawn_N.tolist() == [17] * len(drawn_N)
    assert int(noted["replaced"]) == len(drawn_N)
    assert model.backbone.embedding.weight.grad is not None


def test_a_draw_that_is_the_original_counts_as_original() -> None:
    """As often as the generator is right, where its odds are large and other outputs have the same target."""
    config = config_of({"temperature": 1e-4})
    model, micro = random_model(config), micro_batch(config, ids=range(10, 16))
    embedding = model.backbone.embedding.weight.detach()
    detection = model.auxiliary
    assert isinstance(detection, ReplacedTokens)
    detection.generator.encode_at = lambda *_: embedding[micro.batch.target_ids_N]  # type: ignore
    _, read_BTD, noted = watched(model, micro)
    text_N, likeness_VV = micro.batch.target_ids_N, embedding[10:16] @ embedding[10:16].T
    sure = (likeness_VV.argmax(1) == torch.arange(6))[text_N - 10] & (torch.bincount(text_N)[text_N] > 1)
    assert sure.sum() > 5
    drawn_N = ids_of(read_BTD, model).flatten()[micro.batch.target_index_N]
    assert (drawn_N == text_N)[sure].all()
    assert int(noted["replaced"]) == int((drawn_N != text_N).sum())


def test_without_targets_the_model_still_learns() -> None:
    config = config_of({})
    model, micro = random_model(config), micro_batch(config)
    none = torch.zeros(0, dtype=torch.int64)
    nothing = micro.batch.auxiliary._replace(uniform_N=torch.zeros(0, dtype=torch.float64))
    batch = replace(micro.batch, target_index_N=none, target_ids_N=none, max_targets_per_row=0, auxiliary=nothing)
    candidates = build_objective(config.objective, VOCABULARY).candidate_set(none).candidates(none)
    loss = model(replace(micro, batch=batch, candidates=(candidates,)))
    loss.backward()
    assert loss.item() > 0
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_evaluation_draws_from_the_whole_vocabulary_by_the_head() -> None:
    """With a bias that leaves one id alone all targets become it, whatever is batched together."""
    config = config_of({})
    model, batch = random_model(config).eval(), micro_batch(config).batch
    bias_V = torch.full((VOCABULARY,), -1e6, dtype=torch.float64)
    bias_V[17] = 0.0
    with torch.no_grad():
        twice = model(EvaluationRequest((batch, batch), bias_V)).auxiliary
        once = model(EvaluationRequest((batch,), bias_V)).auxiliary
    assert once["replaced"] == (batch.target_ids_N != 17).sum()
    assert twice == pytest.approx({name: 2 * value for name, value in once.items()})


def test_initial_weights_of_the_generator_are_those_of_a_model_of_its_depth() -> None:
    config = config_of({})
    weights = initial_weights(config)
    names = [name for name in weights.shapes if name.startswith("detection.generator.")]
    assert names
    assert not any("embedding.weight" in name for name in names)
    written = weights.read("detection.generator.blocks.0.mlp.down.weight")
    deep = weights.read("backbone.blocks.0.mlp.down.weight")
    ratio = written.std() / deep.std()
    expected = {"wang": 2.0, "megatron": 2**0.5, "normal": 1.0}
    assert float(ratio) == pytest.approx(expected.get(str(config.model.init), 2.0), rel=0.15)
