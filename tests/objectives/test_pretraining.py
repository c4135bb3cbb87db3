"""A micro-batch's scaled loss, the single lookup, and scores, on a tiny model."""

from __future__ import annotations

from math import log

import pytest
import torch
from numpy.random import default_rng

from megahead.config.loading import config_from_dict
from megahead.config.run import RunConfig
from megahead.config.training import OptimizerConfig
from megahead.data.batch import Batch
from megahead.losses.candidates import Candidates, log_unigram
from megahead.losses.contrastive import build_objective, cwt_loss
from megahead.losses.scores import LearnedTemperature
from megahead.objectives.micro_batch import EvaluationRequest, MicroBatch, documents_of
from megahead.objectives.pretraining import Pretraining, initial_weights, weight_shapes
from megahead.optim import parameter_groups
from support.causal_rows import causal_batch
from support.initialized import initialized


def tiny(objective: dict[str, object]) -> RunConfig:
    return config_from_dict(
        {
            "name": "tiny",
            "model": {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "vocab_size": 50, "vocab_multiple": 64},
            "data": {"train": "nowhere", "sequence_length": 8},
            "batch": {"global_size": 4, "micro_size": 4},
            "objective": objective,
            "optimizer": {"learning_rate": 1e-3},
            "training": {"steps": 3},
        }
    )


def candidates(pretraining: Pretraining, batch: Batch) -> tuple[Candidates, ...]:
    """Of a batch that is one group."""
    objective = build_objective(pretraining.objective, 50, torch.arange(64))
    return (objective.candidate_set(batch.target_ids_N).candidates(batch.target_ids_N),)


def prepared(pretraining: Pretraining, rows: int = 4, loss_weight: float = 1.0) -> MicroBatch:
    tokens = default_rng(0).integers(0, 50, (rows, 9))
    batch = causal_batch(tokens, end_token=0, isolate_documents=True, boundary_targets=True)
    return MicroBatch(batch, candidates(pretraining, batch), loss_weight)


def test_headless_loss_is_the_public_function_on_the_backbones_outputs() -> None:
    pretraining = initialized(tiny({}))
    micro = prepared(pretraining, loss_weight=1 / 32)
    batch = micro.batch
    outputs = pretraining.backbone(batch.input_ids_BT, documents_of(batch)).flatten(0, 1)
    expected = cwt_loss(outputs, batch.target_ids_N, pretraining.backbone.embedding.weight)
    torch.testing.assert_close(pretraining(micro), expected)


def test_headless_gradient_reaches_inputs_and_negatives_in_one_lookup() -> None:
    pretraining = initialized(tiny({}))
    lookups: list[int] = []
    pretraining.backbone.embedding.register_forward_hook(lambda *_: lookups.append(1))
    micro = prepared(pretraining)
    pretraining(micro).backward()
    assert lookups == [1]
    gradient = pretraining.backbone.embedding.weight.grad
    assert gradient is not None
    touched = set(gradient.abs().sum(1).nonzero().flatten().tolist())
    expected = set(micro.batch.input_ids_BT.flatten().tolist()) | set(micro.batch.target_ids_N.tolist())
    assert touched == expected


@pytest.mark.parametrize("all_ids", [True, False])
def test_the_rows_of_what_an_auxiliary_objective_draws_learn(all_ids: bool) -> None:
    pretraining = initialized(tiny({}))
    micro = prepared(pretraining)
    looked_up, rows = pretraining._embed_inputs_and_candidates(micro.batch.input_ids_BT, micro.candidates)
    outputs = pretraining.backbone.encode(looked_up, documents_of(micro.batch)).flatten(0, 1)
    parts = [(outputs, *each) for each in zip(rows, micro.candidates, strict=True)]
    (prediction,) = pretraining._predictions(parts, outputs, micro.batch, all_ids=all_ids)
    index_N = torch.arange(3)
    ids_U = micro.candidates[0].ids_U
    assert ids_U is not None
    prediction.gather_rows(index_N).sum().backward()
    gradient = pretraining.backbone.embedding.weight.grad
    assert gradient is not None
    assert gradient.any(1).nonzero()[:, 0].tolist() == (index_N if all_ids else ids_U[index_N]).tolist()


@pytest.mark.parametrize("tied", [True, False])
def test_vanilla_is_cross_entropy_over_the_vocabulary_without_its_padding(tied: bool) -> None:
    pretraining = initialized(tiny({"name": "vanilla", "tied": tied, "temperature": 0.5}))
    names = [name for name, _ in pretraining.named_parameters()]
    assert ("head.weight" in names) is not tied
    micro = prepared(pretraining, loss_weight=1 / 32)
    batch = micro.batch
    outputs = pretraining.backbone(batch.input_ids_BT, documents_of(batch)).flatten(0, 1)
    matrix = pretraining.backbone.embedding.weight if tied else pretraining.head.weight  # type: ignore[union-attr]
    logits = outputs @ matrix[:50].T / 0.5
    torch.testing.assert_close(pretraining(micro), torch.nn.functional.cross_entropy(logits, batch.target_ids_N))


def test_scoring_is_the_log_probability_under_the_training_free_head() -> None:
    pretraining = initialized(tiny({}))
    batch = prepared(pretraining).batch
    bias = log_unigram(torch.arange(64), 50)
    scores = pretraining(EvaluationRequest((batch,), bias))
    outputs = pretraining.backbone(batch.input_ids_BT, documents_of(batch)).flatten(0, 1)
    logits = outputs @ pretraining.backbone.embedding.weight[:50].T + bias
    expected = torch.nn.functional.cross_entropy(logits, batch.target_ids_N, reduction="sum")
    assert scores.loss == pytest.approx(expected.item(), rel=1e-5)
    assert scores.targets == 32


def test_candidates_of_their_own_are_rows_of_the_second_table_and_leave_the_first_to_inputs() -> None:
    pretraining = initialized(tiny({"candidates": "own"}))
    table = pretraining.get_parameter("head.weight")
    micro = prepared(pretraining)
    batch, ids_N = micro.batch, micro.batch.target_ids_N
    outputs = pretraining.backbone(batch.input_ids_BT, documents_of(batch)).flatten(0, 1)
    loss = pretraining(micro)
    torch.testing.assert_close(loss, 32 * cwt_loss(outputs, ids_N, table))
    loss.backward()
    touched = [weight.grad.any(1).nonzero()[:, 0] for weight in (pretraining.backbone.embedding.weight, table)]
    assert [ids.tolist() for ids in touched] == [batch.input_ids_BT.unique().tolist(), ids_N.unique().tolist()]


EVERY_PART: dict[str, object] = {"vanilla_weight": 0.5, "learned_temperature": True, "max_candidates": 4}


@pytest.mark.parametrize(
    "objective", [{}, {"name": "vanilla"}, {"name": "vanilla", "tied": True}, {"candidates": "own"}, EVERY_PART]
)
def test_a_micro_batch_without_targets_gives_zero_connected_to_every_parameter(objective: dict[str, object]) -> None:
    pretraining = initialized(tiny(objective))
    tokens = default_rng(0).integers(0, 1, (2, 9))  # nothing but end tokens, which predict nothing
    batch = causal_batch(tokens, end_token=0, isolate_documents=True, boundary_targets=False)
    assert batch.target_ids_N.numel() == 0
    loss = pretraining(MicroBatch(batch, candidates(pretraining, batch), 1.0))
    assert loss.item() == 0
    loss.backward()
    for name, parameter in pretraining.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() == 0, name


def test_the_same_seed_gives_the_same_backbone_whatever_the_objective() -> None:
    headless = initialized(tiny({}))
    vanilla = initialized(tiny({"name": "vanilla"}))
    for (name, mine), (_, theirs) in zip(
        headless.backbone.named_parameters(), vanilla.backbone.named_parameters(), strict=True
    ):
        assert torch.equal(mine, theirs), name


@pytest.mark.parametrize("objective", [EVERY_PART, {"name": "vanilla"}])
def test_every_weight_starts_in_the_shape_that_is_stated_for_it(objective: dict[str, object]) -> None:
    config = tiny(objective)
    shapes, weights = weight_shapes(config), initial_weights(config)
    assert shapes
    assert {name: weights.read(name).shape for name in shapes} == shapes


def test_a_mixed_loss_is_the_weighted_sum_of_both() -> None:
    mixed, headless = tiny({"vanilla_weight": 0.25}), initialized(tiny({}))
    pretraining = initialized(mixed)
    vanilla = initialized(tiny({"name": "vanilla"}))
    losses = [model(prepared(model)).item() for model in (pretraining, headless, vanilla)]
    assert losses[0] == pytest.approx(0.75 * losses[1] + 0.25 * losses[2], rel=1e-5)


@pytest.mark.parametrize("objective", [{}, {"name": "vanilla"}, {"vanilla_weight": 0.5, "tied": True}])
def test_a_learned_temperature_starts_where_it_is_told_gets_gradient_and_never_decays(
    objective: dict[str, object],
) -> None:
    fixed = initialized(tiny({"temperature": 0.5, **objective}))
    learned = initialized(tiny({"temperature": 0.5, "learned_temperature": True, **objective}))
    micro = prepared(fixed)
    torch.testing.assert_close(learned(micro), fixed(micro))
    assert learned(EvaluationRequest((micro.batch,), None)).loss == pytest.approx(
        fixed(EvaluationRequest((micro.batch,), None)).loss, rel=1e-5
    )
    learned(micro).backward()
    parameter = learned.get_parameter("temperature.log_value")
    assert parameter.grad is not None
    slope, step = parameter.grad.item(), 1e-2
    with torch.no_grad():
        ends = []
        for sign in (1, -1):
            parameter.fill_(log(0.5) + sign * step)
            ends.append(learned(micro).item())
    assert slope == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-2)
    groups = parameter_groups(learned, OptimizerConfig(learning_rate=1e-3))
    decay = {name: group["weight_decay"] for group in groups for name in group["names"]}
    assert decay["temperature.log_value"] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_learned_temperature_divides_outputs_in_their_own_type(dtype: torch.dtype) -> None:
    temperature = LearnedTemperature(2.0)
    torch.nn.init.constant_(temperature.log_value, log(2))
    outputs = torch.arange(6, dtype=dtype).view(2, 3)
    torch.testing.assert_close(temperature(outputs), outputs / 2)


def test_groups_within_a_micro_batch_share_nothing() -> None:
    pretraining = initialized(tiny({}))
    batch = prepared(pretraining).batch
    halves = batch.target_ids_N.split(16)
    rule = build_objective(pretraining.objective, 50)
    micro = MicroBatch(batch, tuple(rule.candidate_set(ids).candidates(ids) for ids in halves), 1.0)
    outputs = pretraining.backbone(batch.input_ids_BT, documents_of(batch)).flatten(0, 1).split(16)
    table = pretraining.backbone.embedding.weight
    expected = sum(16 * cwt_loss(part, ids, table) for part, ids in zip(outputs, halves, strict=True))
    torch.testing.assert_close(pretraining(micro), expected)


@pytest.mark.parametrize("objective", [{}, {"max_candidates": 4}, {"bias": "corrected"}], ids=str)
def test_staging_for_a_gpu_finds_the_documents_pads_candidates_and_pins_all_without_changing_the_loss(
    monkeypatch: pytest.MonkeyPatch, objective: dict[str, object]
) -> None:
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor.clone()) or pinned[-1])
    pretraining = initialized(tiny(objective))
    micro = prepared(pretraining)
    staged = micro.prepare_for(torch.device("cuda"))
    (buffer,) = pinned
    assert staged.buffer is buffer
    for part in (staged.batch, *staged.candidates):
        for value in filter(torch.is_tensor, vars(part).values()):
            assert value.untyped_storage().data_ptr() == buffer.data_ptr()
    assert staged.batch.cu_seqlens is not None
    assert len(staged.batch.cu_seqlens) == 128
    assert staged.batch.cu_seqlens.tolist()[-1] == 4 * 8
    assert len(staged.candidates[0].ids_U) == 512
    torch.testing.assert_close(pretraining(staged), pretraining(micro))


@pytest.mark.parametrize("objective", [{}, {"max_candidates": 4}, {"bias": "corrected"}], ids=str)
def test_staging_for_half_precision_on_a_cpu_pads_candidates_without_changing_the_loss(
    objective: dict[str, object],
) -> None:
    """Products have few shapes then, whose code is made once."""
    pretraining = initialized(tiny(objective))
    micro, cpu = prepared(pretraining), torch.device("cpu")
    staged = micro.prepare_for(cpu, half_precision=True)
    assert [len(one.ids_U) for one in staged.candidates] == [128]
    assert staged.batch is micro.batch
    torch.testing.assert_close(pretraining(staged), pretraining(micro))
    assert micro.prepare_for(cpu) is micro


def test_a_micro_batch_moves_to_its_device_whole() -> None:
    micro = prepared(initialized(tiny({"bias": "corrected", "max_candidates": 4})), loss_weight=0.5)
    moved = micro.to(torch.device("meta"))
    assert moved.loss_weight == 0.5
    pairs = [(micro.batch, moved.batch), *zip(micro.candidates, moved.candidates, strict=True)]
    for here, there in pairs:
        for name, value in vars(here).items():
            other = getattr(there, name)
            same = other.device.type == "meta" if isinstance(value, torch.Tensor) else other == value
            assert same, name


@pytest.mark.parametrize("objective", [{}, {"name": "vanilla", "output_bias": True}, {"score": "cosine"}], ids=str)
def test_what_wants_to_know_is_told_which_targets_another_candidate_beat(objective: dict[str, object]) -> None:
    pretraining = initialized(tiny(objective))
    told: list[tuple[torch.Tensor, torch.Tensor]] = []
    micro = prepared(pretraining)
    silent = pretraining(micro)
    pretraining.on_errors = lambda ids, missed: told.append((ids, missed))
    assert torch.equal(pretraining(micro), silent)
    ((ids, missed),) = told
    assert torch.equal(ids, micro.batch.target_ids_N)
    (group,) = micro.candidates
    hidden = pretraining.backbone(micro.batch.input_ids_BT, documents_of(micro.batch)).flatten(0, 1)
    matrix = pretraining.backbone.embedding.weight if pretraining.head is None else pretraining.head.weight
    rows = matrix[:50] if group.ids_U is None else matrix[group.ids_U]
    if "score" in objective:
        hidden, rows = (torch.nn.functional.normalize(part, dim=-1) for part in (hidden, rows))
    scores = hidden @ rows.T
    scores = scores if group.bias_U is None else scores + group.bias_U
    assert torch.equal(missed, scores.argmax(1) != group.target_N)
    assert missed.any()
