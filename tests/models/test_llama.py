"""Llama, GPT-2 and Gemma 3: causal, documents apart, published sizes, a sharding table of all that they have."""

from __future__ import annotations

import fnmatch
from typing import Any

import pytest
import torch
from torch import nn

from megahead.config.model import ModelConfig
from megahead.models.backbone import Backbone
from megahead.models.documents import Documents
from megahead.models.families import SHARDING, build_backbone
from megahead.models.layers import RMSNorm
from support.initialized import initialized_backbone

SHAPE: dict[str, Any] = {"family": "llama", "num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": 50}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "grouped": {"num_key_heads": 2},
    "qwen2": {"num_key_heads": 1, "attention_bias": "qkv"},
    "qwen3": {"num_key_heads": 2, "head_dim": 12, "qk_norm": True},
    "all biases": {"attention_bias": "all", "mlp_bias": True},
}
GPT2_AND_GEMMA3: dict[str, dict[str, Any]] = {
    "gpt2": {"family": "gpt2", "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "gemma3": {"family": "gemma3", "num_key_heads": 2, "head_dim": 12, "local_window": 4, "global_every": 2},
}
ALL_KINDS = KINDS | GPT2_AND_GEMMA3
PUBLISHED = {  # name: (vocabulary, tied, parameters)
    "llama-15m": (32_000, True, 15_191_712),
    "llama-1b": (128_256, True, 1_235_814_400),
    "llama-3b": (128_256, True, 3_212_749_824),
    "llama-8b": (128_256, False, 8_030_261_248),
    "gpt2": (50_257, True, 124_439_808),
    "gpt2-xl": (50_257, True, 1_557_611_200),
    "gemma-3-270m": (262_144, True, 268_098_176),
    "gemma-3-1b": (262_144, True, 999_885_952),
    "qwen2-0.5b": (151_936, True, 494_032_768),
    "qwen3-0.6b": (151_936, True, 596_049_920),
    "qwen3-4b": (151_936, True, 4_022_468_096),
    "qwen3-8b": (151_936, False, 8_190_735_360),
}


def tiny(kind: str) -> Backbone:
    torch.manual_seed(0)
    backbone = initialized_backbone(ModelConfig(**SHAPE | ALL_KINDS[kind]), 0)
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    return backbone


@pytest.mark.parametrize("size", PUBLISHED)
def test_named_sizes_have_the_published_parameters(size: str) -> None:
    vocabulary, tied, published = PUBLISHED[size]
    with torch.device("meta"):
        backbone = build_backbone(ModelConfig(size=size, vocab_size=vocabulary, vocab_multiple=1))
    head = 0 if tied else backbone.embedding.weight.numel()
    assert sum(parameter.numel() for parameter in backbone.parameters()) + head == published


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("packed", [True, False])
def test_no_gradient_flows_to_later_tokens_or_other_documents(kind: str, packed: bool) -> None:
    backbone = tiny(kind)
    documents = Documents(torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])) if packed else Documents.whole_rows(1, 8)
    rows = backbone.embed(torch.randint(0, 50, (1, 8))).detach().requires_grad_()
    hidden = backbone.encode(rows, documents)
    for at in range(8):
        (gradient,) = torch.autograd.grad(hidden[0, at, 0], rows, retain_graph=True)
        first = 4 * (at // 4) if packed else 0
        seen = gradient[0].abs().sum(-1) > 0
        assert seen.tolist() == [first <= token <= at for token in range(8)]


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_half_precision_stays_close_without_a_warning(kind: str, recwarn: pytest.WarningsRecorder) -> None:
    """torch warns, and is slow, where a norm's weight is of another type than what it norms."""
    backbone, ids = tiny(kind), torch.randint(0, 50, (2, 12))
    documents = Documents(torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]] * 2))
    exact = backbone(ids, documents)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = backbone(ids, documents)
    half = backbone.bfloat16()(ids, documents)
    for found in (mixed, half):
        torch.testing.assert_close(found.float(), exact, rtol=0.05, atol=0.08)
    assert not [str(told.message) for told in recwarn if "Mismatch dtype" in str(told.message)]


@pytest.mark.parametrize("kind", [*KINDS, "gemma3"])
def test_the_sharding_table_names_every_matrix_and_every_norm(kind: str) -> None:
    modules = dict(tiny(kind).named_modules())
    named: dict[bool, set[str]] = {True: set(), False: set()}
    for pattern, word in SHARDING["gemma3" if kind == "gemma3" else "llama"].items():
        if word not in ("heads", "tokens"):
            named[word in ("norm", "head_norm")].update(fnmatch.filter(modules, pattern))
    norms = {name for name, module in modules.items() if isinstance(module, RMSNorm | nn.Identity)}
    assert named[True] == norms
    assert named[False] == {name for name, module in modules.items() if isinstance(module, nn.Linear | nn.Embedding)}


def test_weights_are_drawn_as_their_names_say() -> None:
    backbone = initialized_backbone(ModelConfig(**SHAPE, **KINDS["qwen3"]), 0)
    for name, parameter in backbone.named_parameters():
        assert bool((parameter == 1).all()) == name.endswith("norm.weight"), name
    gemma = initialized_backbone(
        ModelConfig(**SHAPE | GPT2_AND_GEMMA3["gemma3"]), 0
    )  # whose norms multiply by 1 + weight
    for name, parameter in gemma.named_parameters():
        assert bool((parameter == 0).all()) == name.endswith("norm.weight"), name
    backbone = initialized_backbone(ModelConfig(**SHAPE, **KINDS["all biases"]), 0)
    assert not any(parameter.any() for name, parameter in backbone.named_parameters() if name.endswith(".bias"))
