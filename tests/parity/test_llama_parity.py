"""Our Llama equals transformers' Llama, Mistral, Qwen 2 and Qwen 3: hidden states, logits and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from megahead.config.model import ModelConfig
from megahead.hf.decoders import LLAMA
from megahead.models.backbone import Backbone
from megahead.models.documents import Documents
from megahead.models.families import build_backbone

KINDS: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}, {}),
    "llama with biases": (
        *(LlamaConfig, LlamaForCausalLM),
        {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu_pytorch_tanh"},
        {"attention_bias": "all", "mlp_bias": True, "activation": "gelu_tanh"},
    ),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}, {"attention_bias": "qkv"}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}, {"qk_norm": True}),
    "qwen3 with biases": (
        *(Qwen3Config, Qwen3ForCausalLM),
        {"attention_bias": True},
        {"qk_norm": True, "attention_bias": "all"},
    ),
}
"""Their settings, and ours beside those of the shape."""

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
SCALINGS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "default": ({"rope_type": "default"}, None),
    "linear": ({"rope_type": "linear", "factor": 3.0}, {"kind": "linear", "factor": 3.0}),
    "llama3": (
        {"rope_type": "llama3", "factor": 8.0, **LLAMA3},
        {"kind": "llama3", "factor": 8.0, "original_positions": 32},
    ),
}
SHAPES = [(2, 48, 3, 3, 16), (3, 32, 4, 2, 12), (1, 64, 4, 1, 16)]
"""Layers, width, heads, key heads, dimensions of a head."""


def pair(kind: str, shape: tuple[int, ...], scaling: str = "default") -> tuple[PreTrainedModel, Backbone]:
    """Random weights in theirs, and the same in ours."""
    configs, model_of, their_settings, our_settings = KINDS[kind]
    layers, width, heads, key_heads, head_size = shape
    rope, our_scaling = SCALINGS[scaling]
    model = model_of(
        configs(
            vocab_size=61,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=key_heads,
            head_dim=head_size,
            intermediate_size=100,
            rms_norm_eps=1e-3,
            rope_parameters={**rope, "rope_theta": 500.0},
            attn_implementation="eager",
            pad_token_id=None,
            **their_settings,
        )
    )
    config = ModelConfig(
        family="llama",
        num_layers=layers,
        hidden_size=width,
        num_heads=heads,
        num_key_heads=key_heads,
        head_dim=head_size,
        intermediate_size=100,
        vocab_size=61,
        vocab_multiple=1,
        norm_eps=1e-3,
        rotary_base=500.0,
        rotary_scaling=our_scaling,
        **our_settings,
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.3).add_(1.0 if "norm.weight" in name else 0.0)
    weights = {
        LLAMA.parameter_names(name)[0]: parameter
        for name, parameter in model.named_parameters()
        if "lm_head" not in name
    }
    backbone = build_backbone(config)
    with torch.no_grad():
        for name, parameter in backbone.named_parameters():
            parameter.copy_(weights.pop(f"backbone.{name}"))
    assert not weights
    return model.eval(), backbone


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_hidden_states_and_logits(kind: str, shape: tuple[int, ...], scaling: str) -> None:
    torch.manual_seed(1)
    model, backbone = pair(kind, shape, scaling)
    ids = torch.randint(0, 61, (2, 50))
    with torch.no_grad():
        expected = model(ids, output_hidden_states=True)
        hidden = backbone(ids)
        logits = hidden @ model.get_output_embeddings().weight.T
    torch.testing.assert_close(hidden, expected.hidden_states[-1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits, expected.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_equal_each_alone(kind: str) -> None:
    torch.manual_seed(3)
    model, backbone = pair(kind, SHAPES[1])
    documents = [torch.randint(0, 61, (1, length)) for length in (9, 1, 20)]
    positions = torch.cat([torch.arange(ids.shape[1]) for ids in documents])[None]
    with torch.no_grad():
        packed = backbone(torch.cat(documents, 1), Documents(positions))
        expected = torch.cat([model.model(ids).last_hidden_state for ids in documents], 1)
    torch.testing.assert_close(packed, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients(kind: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(4)
    model, backbone = pair(kind, shape)
    ids = torch.randint(0, 61, (2, 17))
    weights = torch.randn(2, 17, shape[1])
    (model.model(ids).last_hidden_state * weights).mean().backward()
    (backbone(ids) * weights).mean().backward()
    expected = {
        LLAMA.parameter_names(f"model.{name}")[0]: parameter.grad for name, parameter in model.model.named_parameters()
    }
    for name, parameter in backbone.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[f"backbone.{name}"], rtol=1e-4, atol=1e-5, msg=name)
