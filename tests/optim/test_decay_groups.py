"""Which weights of a real model decay, by name."""

from __future__ import annotations

import torch

from megahead.config import ModelConfig
from megahead.models import build_backbone
from megahead.optim import decay_groups

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
    decaying, plain = decay_groups(model, 0.1)
    assert (decaying["names"], decaying["weight_decay"]) == (MATRICES, 0.1)
    assert (plain["names"], plain["weight_decay"]) == (VECTORS, 0.0)
    parameters = dict(model.named_parameters())
    for group in (decaying, plain):
        assert all(parameters[n] is p for n, p in zip(group["names"], group["params"], strict=True))


def test_frozen_parameters_and_empty_groups_are_left_out():
    model = build_backbone(TINY)
    model.requires_grad_(False)
    model.embedding.requires_grad_()
    assert [group["names"] for group in decay_groups(model, 0.1)] == [["embedding.weight"]]


def test_a_shared_parameter_appears_once():
    model = torch.nn.ModuleDict({"backbone": build_backbone(TINY), "head": torch.nn.Linear(16, 32, bias=False)})
    model["head"].weight = model["backbone"].embedding.weight
    names = [name for group in decay_groups(model, 0.1) for name in group["names"]]
    assert names.count("backbone.embedding.weight") == 1
    assert "head.weight" not in names
