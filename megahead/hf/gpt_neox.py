"""What Hugging Face calls the parts and settings of GPT-NeoX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megahead.config.model import ModelConfig
from megahead.errors import FieldError
from megahead.hf.names import Renames

BACKBONE_PREFIX = "gpt_neox."
"""Begins every name in a `GPTNeoXForCausalLM` but the head's; a lone `GPTNeoXModel` goes without it."""

RENAMES = Renames(
    {
        "backbone.embedding": "gpt_neox.embed_in",
        "backbone.blocks.*.attention_norm": "gpt_neox.layers.*.input_layernorm",
        "backbone.blocks.*.attention.qkv": "gpt_neox.layers.*.attention.query_key_value",
        "backbone.blocks.*.attention.output": "gpt_neox.layers.*.attention.dense",
        "backbone.blocks.*.mlp_norm": "gpt_neox.layers.*.post_attention_layernorm",
        "backbone.blocks.*.mlp.up": "gpt_neox.layers.*.mlp.dense_h_to_4h",
        "backbone.blocks.*.mlp.down": "gpt_neox.layers.*.mlp.dense_4h_to_h",
        "backbone.final_norm": "gpt_neox.final_layer_norm",
        "head": "embed_out",
    }
)

_BUFFERS = (".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")  # stored by old versions
_ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh"}


def our_names(theirs: str) -> tuple[str, ...]:
    """Our name of a stored tensor of theirs, in a model with a head or without; none for what is no parameter.

    Raises FieldError for a name that GPT-NeoX does not have.
    """
    if theirs.endswith(_BUFFERS):
        return ()
    name = "embed_out.weight" if theirs == "lm_head.weight" else theirs
    if not name.startswith((BACKBONE_PREFIX, "embed_out.")):
        name = BACKBONE_PREFIX + name
    ours = RENAMES.ours(name)
    if not ours:
        raise FieldError("model", "hold tensors of a GPT-NeoX model only", got=f"one that has {theirs}")
    return ours


def gpt_neox_config(model: ModelConfig) -> dict[str, Any]:
    """What `config.json` says of the shape of `model`.

    Rotary settings appear twice: `rope_parameters` for transformers 5, `rotary_*` for older readers.
    """
    return {
        "model_type": "gpt_neox",
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "intermediate_size": model.mlp_size(),
        "hidden_act": "gelu" if model.activation == "gelu" else "gelu_pytorch_tanh",
        "attention_dropout": model.attention_dropout,
        "hidden_dropout": model.hidden_dropout,
        "max_position_embeddings": model.max_positions,
        "initializer_range": model.init_std,
        "layer_norm_eps": model.norm_eps,
        "use_parallel_residual": model.parallel_residual,
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": model.rotary_base,
            "partial_rotary_factor": model.rotary_pct,
        },
        "rotary_pct": model.rotary_pct,
        "rotary_emb_base": model.rotary_base,
        "use_cache": True,
    }


def model_settings(content: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a ModelConfig that a `config.json` asks for; FieldError for what our GPT-NeoX has not."""
    _check(content)
    rope = content.get("rope_parameters") or {}
    return {
        "family": "gpt_neox",
        "num_layers": content["num_hidden_layers"],
        "hidden_size": content["hidden_size"],
        "num_heads": content["num_attention_heads"],
        "intermediate_size": content["intermediate_size"],
        "vocab_size": content["vocab_size"],
        "max_positions": content.get("max_position_embeddings", 2048),
        "rotary_pct": rope.get("partial_rotary_factor", content.get("rotary_pct", 0.25)),
        "rotary_base": rope.get("rope_theta", content.get("rotary_emb_base", 10000.0)),
        "parallel_residual": content.get("use_parallel_residual", True),
        "activation": _ACTIVATIONS[content.get("hidden_act", "gelu")],
        "norm_eps": content.get("layer_norm_eps", 1e-5),
        "hidden_dropout": content.get("hidden_dropout", 0.0),
        "attention_dropout": content.get("attention_dropout", 0.0),
        "init_std": content.get("initializer_range", 0.02),
    }


def _check(content: Mapping[str, Any]) -> None:
    if content.get("model_type") != "gpt_neox":
        raise FieldError("config.json: model_type", "be gpt_neox", got=content.get("model_type"))
    for key in ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"):
        if key not in content:
            raise FieldError(f"config.json: {key}", "be given", got="missing")
    activation = content.get("hidden_act", "gelu")
    if activation not in _ACTIVATIONS:
        raise FieldError("config.json: hidden_act", f"be one of {', '.join(_ACTIVATIONS)}", got=activation)
    scaling = content.get("rope_scaling") or content.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind != "default":
        raise FieldError("config.json: rope_parameters.rope_type", "be default (no scaling)", got=kind)
    if not content.get("attention_bias", True):
        raise FieldError("config.json: attention_bias", "be true", got="false")
