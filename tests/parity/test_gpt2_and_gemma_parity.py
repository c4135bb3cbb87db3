"""Our GPT-2 and Gemma 3 equal those of transformers: hidden states, logits and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from megahead.config.model import ModelConfig
from megahead.hf.importing import FAMILIES
from megahead.models.backbone import Backbone
from megahead.models.documents import Documents
from megahead.models.families import build_backbone

V = 61
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
WIDE = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 24}
NARROW = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}


def rope(**scaling: Any) -> dict[str, Any]:
    bases = {"full_attention": {"rope_theta": 500.0, **scaling}, "sliding_attention": {"rope_theta": 100.0}}
    return {"rope_parameters": {kind: {"rope_type": "default", **base} for kind, base in bases.items()}}


KINDS: dict[str, PreTrainedModel | Any] = {
    "gpt2 of 2": lambda: GPT2Config(n_embd=48, n_layer=2, n_head=6, n_inner=100),
    "gpt2 of 4, exact gelu": lambda: GPT2Config(n_embd=32, n_layer=4, n_head=2, activation_function="gelu"),
    "gemma": lambda: Gemma3TextConfig(**NARROW, num_hidden_layers=7, sliding_window=8, query_pre_attn_scalar=16),
    "gemma, other scores": lambda: Gemma3TextConfig(
        **WIDE, num_hidden_layers=3, sliding_window=6, sliding_window_pattern=2, query_pre_attn_scalar=40
    ),
    "gemma, linear": lambda: Gemma3TextConfig(
        **NARROW, **rope(rope_type="linear", factor=3.0), num_hidden_layers=2, sliding_window_pattern=1
    ),
    "gemma, llama3": lambda: Gemma3TextConfig(
        **WIDE, **rope(rope_type="llama3", factor=8.0, **LLAMA3), num_hidden_layers=6, sliding_window=4
    ),
}


def pair(kind: str) -> tuple[PreTrainedModel, Backbone]:
    """Random weights in theirs, and the same in ours."""
    config = KINDS[kind]()
    config.vocab_size, config.pad_token_id, config._attn_implementation = V, None, "eager"
    if kind.startswith("gemma"):
        config.intermediate_size, config.max_position_embeddings, config.rms_norm_eps = 100, 64, 1e-3
    model = (Gemma3ForCausalLM if kind.startswith("gemma") else GPT2LMHeadModel)(config)
    family = FAMILIES[config.model_type]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    backbone = build_backbone(ModelConfig(**family.model_settings(config.to_dict()), vocab_multiple=1))
    with torch.no_grad():
        for name, parameter in gathered(model, dict(model.named_parameters())).items():
            backbone.get_parameter(name).copy_(parameter)
    return model.eval(), backbone.eval()


def gathered(model: PreTrainedModel, tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Theirs by our names, stacked ones cut up."""
    family, ours = FAMILIES[model.config.model_type], {}
    for name, tensor in tensors.items():
        names = family.parameter_names(name)
        rows = tensor.T if name.endswith(family.transposed_names) else tensor
        ours |= dict(zip(names, rows.chunk(len(names)), strict=True))
    return {name.removeprefix("backbone."): tensor for name, tensor in ours.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_and_logits(kind: str) -> None:
    torch.manual_seed(1)
    model, backbone = pair(kind)
    ids = torch.randint(0, V, (2, 50))
    with torch.no_grad():
        expected = model(ids, output_hidden_states=True)
        hidden = backbone(ids)
        logits = hidden @ backbone.embedding.weight.T  # its rows are not scaled
    torch.testing.assert_close(hidden, expected.hidden_states[-1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits, expected.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_equal_each_alone(kind: str) -> None:
    torch.manual_seed(3)
    model, backbone = pair(kind)
    documents = [torch.randint(0, V, (1, length)) for length in (9, 1, 20)]
    positions = torch.cat([torch.arange(ids.shape[1]) for ids in documents])[None]
    with torch.no_grad():
        packed = backbone(torch.cat(documents, 1), Documents(positions))
        expected = torch.cat([model.base_model(ids).last_hidden_state for ids in documents], 1)
    torch.testing.assert_close(packed, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind: str) -> None:
    torch.manual_seed(4)
    model, backbone = pair(kind)
    ids, weights = torch.randint(0, V, (2, 17)), torch.randn(2, 17, backbone.embedding.weight.shape[1])
    (model.base_model(ids).last_hidden_state * weights).mean().backward()
    (backbone(ids) * weights).mean().backward()
    expected = gathered(model, {name: p.grad for name, p in model.named_parameters()})
    for name, parameter in backbone.named_parameters():
        torch.testing.assert_close(parameter.grad, expected.pop(name), rtol=1e-4, atol=1e-5, msg=name)
    assert not expected


@pytest.mark.parametrize("kind", ["gpt2 of 2", "gemma"])
def test_bf16_is_no_further_from_fp32_than_theirs(kind: str) -> None:
    """The scale of a Gemma's embeddings, sqrt(32), is rounded as theirs."""
    torch.manual_seed(5)
    model, backbone = pair(kind)
    ids = torch.randint(0, V, (4, 50))
    with torch.no_grad():
        exact = backbone(ids)
        ours, theirs = backbone.bfloat16()(ids).float(), model.bfloat16().base_model(ids).last_hidden_state.float()
    assert (ours - exact).norm() < 1.2 * (theirs - exact).norm()
