"""How the weights of a real model move, by name."""

from __future__ import annotations

import torch

from megahead.config.model import ModelConfig
from megahead.config.training import MuonConfig, OptimizerConfig, TableConfig
from megahead.models.families import build_backbone
from megahead.optim import parameter_groups, set_learning_rate

ADAMW = OptimizerConfig(learning_rate=1e-3, weight_decay=0.1)
TINY = ModelConfig(num_layers=1, hidden_size=16, num_heads=2, vocab_size=32, vocab_multiple=8)
MATRICES = [
    "embedding.weight",
    "blocks.0.attention.qkv.weight",
    "blocks.0.attention.output.weight",
    "blocks.0.mlp.up.weight",
    "blocks.0.mlp.down.weight",
]
VECTORS = [
    "blocks.0.attention_norm.weight",
    "blocks.0.attention_norm.bias",
    "blocks.0.attention.qkv.bias",
    "blocks.0.attention.output.bias",
    "blocks.0.mlp_norm.weight",
    "blocks.0.mlp_norm.bias",
    "blocks.0.mlp.up.bias",
    "blocks.0.mlp.down.bias",
    "final_norm.weight",
    "final_norm.bias",
]


def test_matrices_decay_and_norms_and_biases_do_not():
    model = build_backbone(TINY)
    decaying, plain = parameter_groups(model, ADAMW)
    assert (decaying["names"], decaying["weight_decay"]) == (MATRICES, 0.1)
    assert (plain["names"], plain["weight_decay"]) == (VECTORS, 0.0)
    parameters = dict(model.named_parameters())
    for group in (decaying, plain):
        assert all(parameters[n] is p for n, p in zip(group["names"], group["params"], strict=True))


def test_frozen_parameters_and_empty_groups_are_left_out():
    model = build_backbone(TINY)
    model.requires_grad_(False)
    model.embedding.requires_grad_()
    assert [group["names"] for group in parameter_groups(model, ADAMW)] == [["embedding.weight"]]


def test_a_shared_parameter_appears_once():
    model = torch.nn.ModuleDict({"backbone": build_backbone(TINY), "head": torch.nn.Linear(16, 32, bias=False)})
    model["head"].weight = model["backbone"].embedding.weight
    names = [name for group in parameter_groups(model, ADAMW) for name in group["names"]]
    assert names.count("backbone.embedding.weight") == 1
    assert "head.weight" not in names


def with_head() -> torch.nn.ModuleDict:
    """A model with a head, and an auxiliary objective with one of its own."""
    parts = {"backbone": build_backbone(TINY), "head": torch.nn.Linear(16, 32, bias=False)}
    return torch.nn.ModuleDict(parts | {"custom": torch.nn.ModuleDict({"head": torch.nn.Linear(16, 4, bias=False)})})


def test_embedding_and_head_have_a_rate_of_their_own():
    config = ADAMW.model_copy(update={"table": TableConfig(learning_rate_ratio=8)})
    groups = parameter_groups(with_head(), config)
    set_learning_rate(groups, 0.25)
    rates = {name: group["lr"] for group in groups for name in group["names"]}
    assert rates.pop("backbone.embedding.weight") == rates.pop("head.weight") == 2.0
    assert set(rates.values()) == {0.25}
    assert len(groups) == 3


def test_muon_moves_the_matrices_of_blocks_alone():
    config = ADAMW.model_copy(update={"name": "muon", "muon": MuonConfig(learning_rate_ratio=2)})
    groups = parameter_groups(with_head(), config)
    joint, own = (group for group in groups if group["is_muon"])
    assert joint["names"] + own["names"] == [f"backbone.{name}" for name in MATRICES[1:]]
    assert (own["weight_decay"], own["learning_rate_ratio"], own["qkv_head_size"]) == (0.1, 2, None)
    assert (joint["weight_decay"], joint["learning_rate_ratio"], joint["qkv_head_size"]) == (0.1, 2, 8)
