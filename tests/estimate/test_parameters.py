"""Counts from the config equal those of the built model."""

from __future__ import annotations

import pytest
import torch

from megahead.config.model import NAMED_SIZES, ModelConfig
from megahead.config.plan import RunPlan, phases_of
from megahead.estimate import body_parameters, rank_memory, run_flops, run_parameters
from megahead.models.families import build_backbone
from megahead.objectives.pretraining import weight_shapes
from support.small_checkpoint import small_config

ODD = ModelConfig(num_layers=3, hidden_size=48, num_heads=3, intermediate_size=100, vocab_size=61, vocab_multiple=16)


@pytest.mark.parametrize("config", [ODD, *(ModelConfig(size=size, vocab_size=50277) for size in NAMED_SIZES)])
def test_counts_equal_the_model(config):
    with torch.device("meta"):
        backbone = build_backbone(config)
    embedding = config.padded_vocab_size() * config.hidden_size
    assert embedding == backbone.embedding.weight.numel()
    assert embedding + body_parameters(config) == sum(parameter.numel() for parameter in backbone.parameters())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "model",
    [
        {"family": "bert"},
        {"family": "xlm_roberta", "position_offset": 5},
        {"family": "modernbert"},
        {"family": "modernbert", "transform_bias": True},
    ],
    ids=str,
)
def test_an_encoders_transform_is_counted(tied, model):
    config = small_config(
        model={**model, "max_positions": 32},
        masking={"mask_token": 3, "cls_token": 1, "sep_token": 2, "special_tokens": [4]},
        objective={"name": "vanilla", "tied": tied},
    )
    parameters = sum(shape.numel() for shape in weight_shapes(config).values())
    assert run_parameters(config).total == parameters


@pytest.mark.parametrize(
    "objective",
    [
        {"name": "vanilla", "output_bias": True},
        {"tied": True, "schedule": {"vanilla_share": 0.5}},
        {"learned_temperature": True},
        {"candidates": "own"},
    ],
)
def test_a_bias_for_each_token_is_counted(objective):
    config = small_config(objective=objective)
    last = phases_of(config)[-1].config
    assert run_parameters(config).total == sum(shape.numel() for shape in weight_shapes(last).values())
    heads = [shape for name, shape in weight_shapes(last).items() if not name.startswith("backbone.")]
    assert run_parameters(config).head == sum(shape.numel() for shape in heads)


def test_a_decoder_of_masks_is_counted_in_its_weights_and_operations():
    masking = {"mask_token": 3, "cls_token": 1, "sep_token": 2, "rate": 0.4}
    model = {"family": "bert", "max_positions": 32}
    config = small_config(model=model, masking=masking | {"mask_decoder_layers": 2})
    assert run_parameters(config).total == sum(shape.numel() for shape in weight_shapes(config).values())
    late = small_config(model=model | {"num_layers": 4}, masking=masking | {"masks_from_layer": 2})
    assert run_parameters(config) == run_parameters(late)
    assert run_flops(config, 10) == run_flops(late, 10)
    (one, other) = (rank_memory(RunPlan.of(each, 1)) for each in (config, late))
    assert one == other


@pytest.mark.parametrize("objective", ["retromae", "tsdae"])
@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_a_decoder_of_texts_is_counted(family, objective):
    config = small_config(
        model={"family": family, "max_positions": 32, "num_layers": 2},
        masking={"mask_token": 3, "cls_token": 1, "sep_token": 2},
        objective={objective: {}},
    )
    assert run_parameters(config).total == sum(shape.numel() for shape in weight_shapes(config).values())


@pytest.mark.parametrize("family", ["gpt_neox", "llama", "gpt2", "gemma3"])
def test_heads_of_tokens_further_ahead_are_counted(family):
    config = small_config(model={"family": family, "max_positions": 32}, objective={"multi_token": {"heads": 3}})
    assert run_parameters(config).total == sum(shape.numel() for shape in weight_shapes(config).values())


def test_an_untied_head_is_one_more_table():
    objectives = [{"name": "vanilla", "tied": True}, {"name": "vanilla"}]
    without, with_head = (run_parameters(small_config(objective=objective)) for objective in objectives)
    assert with_head.head == with_head.embedding == 64 * 48
    assert with_head.total == without.total + 64 * 48


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_a_generator_and_what_judges_tokens_are_counted(family):
    config = small_config(
        model={"family": family, "max_positions": 32, "num_layers": 2},
        masking={"mask_token": 3, "cls_token": 1, "sep_token": 2},
        objective={"replaced_tokens": {"generator_layers": 2}},
    )
    shapes, counts = weight_shapes(config), run_parameters(config)
    assert counts.total == sum(shape.numel() for shape in shapes.values())
    of_generator = [shape.numel() for name, shape in shapes.items() if name.startswith("detection.generator.")]
    assert counts.generator == sum(of_generator)
    assert counts.head == sum(shape.numel() for name, shape in shapes.items() if name.startswith("detection.head."))
