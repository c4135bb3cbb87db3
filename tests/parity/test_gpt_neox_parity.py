"""Our GPT-NeoX equals transformers': hidden states, logits and gradients, on small shapes with random weights."""

from __future__ import annotations

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from megahead.config.model import ModelConfig
from megahead.models.backbone import Backbone
from megahead.models.documents import Documents
from megahead.models.families import build_backbone

HIDDEN_ACT = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
THEIR_NAMES = {
    "embedding": "embed_in",
    "blocks": "layers",
    "attention_norm": "input_layernorm",
    "attention.qkv": "attention.query_key_value",
    "attention.output": "attention.dense",
    "mlp_norm": "post_attention_layernorm",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
    "final_norm": "final_layer_norm",
}


def shape(rotary_pct: float, parallel: bool, activation: str, seed: int) -> ModelConfig:
    """A small shape that differs with the seed; the MLP is not always 4 x the width."""
    heads, head_size, layers = (3, 16, 2) if seed % 2 else (2, 24, 3)
    return ModelConfig(
        num_layers=layers,
        hidden_size=heads * head_size,
        num_heads=heads,
        intermediate_size=100 if seed % 3 else None,
        vocab_size=61,
        vocab_multiple=16,
        rotary_pct=rotary_pct,
        rotary_base=10000.0 if seed % 2 else 500.0,
        parallel_residual=parallel,
        activation=activation,
        norm_eps=1e-5 if seed % 2 else 1e-3,
    )


def theirs(config: ModelConfig) -> GPTNeoXForCausalLM:
    model = GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=config.padded_vocab_size(),
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            intermediate_size=config.mlp_size(),
            hidden_act=HIDDEN_ACT[config.activation],
            layer_norm_eps=config.norm_eps,
            use_parallel_residual=config.parallel_residual,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": config.rotary_base,
                "partial_rotary_factor": config.rotary_pct,
            },
            attn_implementation="eager",
        )
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.3).add_(1.0 if "norm.weight" in name else 0.0)
    return model.eval()


def their_name(name: str) -> str:
    for ours, other in THEIR_NAMES.items():
        name = name.replace(ours, other)
    return name


def ours_from(model: GPTNeoXForCausalLM, config: ModelConfig) -> Backbone:
    weights = dict(model.gpt_neox.named_parameters())
    backbone = build_backbone(config)
    with torch.no_grad():
        for name, parameter in backbone.named_parameters():
            parameter.copy_(weights.pop(their_name(name)))
    assert not weights
    return backbone


@pytest.mark.parametrize("rotary_pct", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize("seed", [1, 2])
def test_hidden_states_and_logits(rotary_pct, parallel, activation, seed):
    torch.manual_seed(seed)
    config = shape(rotary_pct, parallel, activation, seed)
    model = theirs(config)
    backbone = ours_from(model, config)
    ids = torch.randint(0, 61, (3, 33))
    with torch.no_grad():
        expected = model(ids, output_hidden_states=True)
        hidden = backbone(ids)
        torch.testing.assert_close(hidden, expected.hidden_states[-1], rtol=1e-4, atol=1e-4)
        logits = hidden @ model.get_output_embeddings().weight.T
    torch.testing.assert_close(logits, expected.logits, rtol=1e-4, atol=1e-4)


def test_packed_documents_equal_each_alone():
    torch.manual_seed(3)
    config = shape(0.25, True, "gelu_tanh", 3)
    model = theirs(config)
    documents = [torch.randint(0, 61, (1, length)) for length in (9, 1, 20)]
    positions = torch.cat([torch.arange(ids.shape[1]) for ids in documents])[None]
    with torch.no_grad():
        packed = ours_from(model, config)(torch.cat(documents, 1), Documents(positions))
        expected = torch.cat([model.gpt_neox(ids).last_hidden_state for ids in documents], 1)
    torch.testing.assert_close(packed, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("parallel", [True, False])
def test_gradients(parallel):
    torch.manual_seed(4)
    config = shape(0.25, parallel, "gelu_tanh", 4)
    model = theirs(config)
    backbone = ours_from(model, config)
    ids = torch.randint(0, 61, (2, 17))
    weights = torch.randn(2, 17, config.hidden_size)
    (model.gpt_neox(ids).last_hidden_state * weights).mean().backward()
    (backbone(ids) * weights).mean().backward()
    expected = {name: parameter.grad for name, parameter in model.gpt_neox.named_parameters()}
    for name, parameter in backbone.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[their_name(name)], rtol=1e-4, atol=1e-5, msg=name)
