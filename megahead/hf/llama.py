"""What Hugging Face calls the parts and settings of Llama, Qwen 2, Qwen 3, Mistral, and ERNIE 4.5."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from megahead.config.model import ModelConfig
from megahead.errors import FieldError
from megahead.hf.names import Renames

# What Hugging Face calls the parts and settings of Llama; of Qwen 2, Qwen 3 and Mistral, which are settings of it.
#
# Mistral goes out as a Llama, whose bricks it has.

BACKBONE_PREFIX = "model."
"""Begins every name in a `LlamaForCausalLM` but the head's; a lone `LlamaModel` goes without it."""

RENAMES = Renames(
    {
        "backbone.embedding": "model.embed_tokens",
        "backbone.blocks.*.attention_norm": "model.layers.*.input_layernorm",
        "backbone.blocks.*.attention.query": "model.layers.*.self_attn.q_proj",
        "backbone.blocks.*.attention.key": "model.layers.*.self_attn.k_proj",
        "backbone.blocks.*.attention.value": "model.layers.*.self_attn.v_proj",
        "backbone.blocks.*.attention.query_norm": "model.layers.*.self_attn.q_norm",
        "backbone.blocks.*.attention.key_norm": "model.layers.*.self_attn.k_norm",
        "backbone.blocks.*.attention.output": "model.layers.*.self_attn.o_proj",
        "backbone.blocks.*.mlp_norm": "model.layers.*.post_attention_layernorm",
        "backbone.blocks.*.mlp.gate": "model.layers.*.mlp.gate_proj",
        "backbone.blocks.*.mlp.up": "model.layers.*.mlp.up_proj",
        "backbone.blocks.*.mlp.down": "model.layers.*.mlp.down_proj",
        "backbone.final_norm": "model.norm",
        "head": "lm_head",
    }
)

_SETTINGS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_key_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "attention_dropout": "attention_dropout",
    "init_std": "initializer_range",
}
"""Settings of ours and theirs that mean the same."""

_SCALING = {
    "factor": "factor",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "original_positions": "original_max_position_embeddings",
}
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
_HF_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
_UNTOLD = {"norm_eps": 1e-6, "max_positions": 2048}


def our_names(theirs: str) -> tuple[str, ...]:
    """Our name of a stored tensor of theirs, in a model with a head or without; none for what is no parameter.

    Raises FieldError for a name that Llama does not have.
    """
    if theirs.endswith(".rotary_emb.inv_freq"):  # stored by old versions
        return ()
    ours = RENAMES.ours(theirs if theirs.startswith((BACKBONE_PREFIX, "lm_head.")) else BACKBONE_PREFIX + theirs)
    if not ours:
        raise FieldError("model", "hold tensors of a Llama only", got=f"one that has {theirs}")
    return ours


def kind_of(model: ModelConfig) -> str:
    """The `model_type` that has all that `model` has."""
    if model.qk_norm:
        return "qwen3"
    return "qwen2" if model.attention_bias == "qkv" else "llama"


def llama_config(model: ModelConfig) -> dict[str, Any]:
    """What `config.json` says of the shape of `model`, of the kind that `kind_of` names.

    Rotary settings appear twice: `rope_parameters` for transformers 5, the others for older readers; llama.cpp looks
    for the positions of `llama3` beside them.
    """
    kind = kind_of(model)
    scaling = _their_scaling(model)
    settings = {theirs: getattr(model, ours) for ours, theirs in _SETTINGS.items()}
    settings |= {"num_key_value_heads": model.key_heads(), "head_dim": model.head_size()}
    settings |= {"intermediate_size": model.mlp_size(), "hidden_act": _HF_ACTIVATIONS[model.activation]}
    rotary = {
        "rope_parameters": {"rope_type": "default", **scaling, "rope_theta": model.rotary_base},
        "rope_theta": model.rotary_base,
        "rope_scaling": scaling or None,
    }
    rotary |= {name: value for name, value in scaling.items() if name == _SCALING["original_positions"]}
    biases: dict[str, Any] = {
        "llama": {"attention_bias": model.attention_bias == "all", "mlp_bias": model.mlp_bias},
        "qwen2": {"use_sliding_window": False},
        "qwen3": {"attention_bias": model.attention_bias == "all", "use_sliding_window": False},
    }[kind]
    return {"model_type": kind, **settings, **rotary, **biases, "use_cache": True}


def _their_scaling(model: ModelConfig) -> dict[str, Any]:
    ours = model.rotary_scaling
    if ours is None:
        return {}
    told = ("factor",) if ours.kind == "linear" else tuple(_SCALING)
    return {"rope_type": ours.kind} | {_SCALING[name]: getattr(ours, name) for name in told}


def settings_of(kind: str) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """For a `model_type`: the settings of a ModelConfig that its `config.json` asks for; FieldError for what our Llama
    has not."""

    def settings(content: Mapping[str, Any]) -> dict[str, Any]:
        _check(content, kind)
        known = {ours: content[theirs] for ours, theirs in _SETTINGS.items() if content.get(theirs) is not None}
        bias = "qkv" if kind == "qwen2" else "all" if content.get("attention_bias", False) else "none"
        made = {"head_dim": 128} if kind == "qwen3" else {}
        return {
            "family": "llama",
            **_UNTOLD,
            **made,
            **known,
            "activation": _ACTIVATIONS[content.get("hidden_act", "silu")],
            "qk_norm": kind == "qwen3",
            "attention_bias": bias,
            "mlp_bias": kind == "llama" and content.get("mlp_bias", False),
            **_rotary(content),
        }

    return settings


def _check(content: Mapping[str, Any], kind: str) -> None:
    needed = ["num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"]
    for key in needed if kind == "llama" else [*needed, "num_key_value_heads"]:
        if key not in content:
            raise FieldError(f"config.json: {key}", "be given", got="missing")
    activation = content.get("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise FieldError("config.json: hidden_act", f"be one of {', '.join(_ACTIVATIONS)}", got=activation)
    window = content.get("sliding_window", 4096 if kind == "mistral" else None)
    if window is not None and (kind == "mistral" or content.get("use_sliding_window", False)):
        raise FieldError("config.json: sliding_window", "be null (each token sees all before it)", got=window)
    if any(layer != "full_attention" for layer in content.get("layer_types") or ()):
        raise FieldError("config.json: layer_types", "be full_attention for all", got="others")
    if content.get("quantization_config") is not None:
        raise FieldError("config.json: quantization_config", "be missing (weights as they are)", got="given")


def _rotary(content: Mapping[str, Any]) -> dict[str, Any]:
    """rotary_base, and rotary_scaling where there is any."""
    told = {**(content.get("rope_parameters") or {}), **(content.get("rope_scaling") or {})}
    kind = told.get("rope_type", told.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        rule = "be default, linear or llama3"
        raise FieldError("config.json: rope_parameters.rope_type", rule, got=kind)
    share = told.get("partial_rotary_factor", content.get("partial_rotary_factor", 1.0))
    if share != 1.0:
        raise FieldError("config.json: partial_rotary_factor", "be 1", got=share)
    base = {"rotary_base": told.get("rope_theta", content.get("rope_theta", 10000.0))}
    if kind == "default":
        return base
    wanted = ("factor",) if kind == "linear" else tuple(_SCALING)
    told.setdefault("original_max_position_embeddings", content.get("max_position_embeddings", 2048))
    for name in wanted:
        if _SCALING[name] not in told:
            raise FieldError(f"config.json: rope_parameters.{_SCALING[name]}", f"be given for {kind}", got="missing")
    return {**base, "rotary_scaling": {"kind": kind, **{name: told[_SCALING[name]] for name in wanted}}}


# A Llama whose head has a bias: ERNIE 4.5 of Hugging Face without its experts.
#
# No class that Hugging Face calls Llama or Qwen has a bias in its head, and behind an RMS norm none can be folded in:
# its outputs lie on an ellipsoid around 0, on which no linear form is constant. `Ernie4_5_MoeForCausalLM` has all
# bricks of a Llama, and biases everywhere with `use_bias`, the head included; those that a Llama lacks are stored as
# zeros. Its rotary positions turn neighbours, 2i and 2i + 1, where Llama's turn i and i + d/2: rows of queries and
# keys change places. The function stays the same, number by number. It has no norms of queries and keys.
#
# d dimensions of a head.

HEAD_BIAS = "lm_head.bias"


def ernie_config(model: ModelConfig) -> dict[str, Any]:
    """What `config.json` says of the shape of `model`."""
    shape = llama_config(model)
    for foreign in ("attention_bias", "mlp_bias", "attention_dropout", "use_sliding_window"):
        shape.pop(foreign, None)
    no_experts = {
        "moe_layer_start_index": model.num_layers,
        "moe_layer_end_index": model.num_layers,
        "moe_num_experts": 1,
        "moe_num_shared_experts": 0,
        "moe_k": 1,
        "moe_intermediate_size": model.mlp_size(),
    }
    return {**shape, **no_experts, "model_type": "ernie4_5_moe", "use_bias": True}


def as_stored(model: ModelConfig, name: str, tensor: Tensor) -> Tensor:
    """Our parameter `name` as ERNIE stores it: rows of queries and keys in the order of its rotary positions."""
    if not name.rpartition(".")[0].endswith(("attention.query", "attention.key")):
        return tensor
    pairs: Tensor = tensor.unflatten(0, (-1, 2, model.head_size() // 2)).transpose(1, 2)  # heads, pairs, halves
    return pairs.flatten(0, 2)


def zero_biases(model: ModelConfig) -> dict[str, int]:
    """The biases that `model` lacks, by their names in ERNIE, and their sizes."""
    keys = model.key_heads() * model.head_size()
    lacking = {"self_attn.o_proj": model.hidden_size} if model.attention_bias != "all" else {}
    if model.attention_bias == "none":
        lacking |= {"self_attn.q_proj": model.num_heads * model.head_size()}
        lacking |= {"self_attn.k_proj": keys, "self_attn.v_proj": keys}
    if not model.mlp_bias:
        lacking |= {"mlp.gate_proj": model.mlp_size(), "mlp.up_proj": model.mlp_size()}
        lacking |= {"mlp.down_proj": model.hidden_size}
    layers = range(model.num_layers)
    return {f"model.layers.{layer}.{part}.bias": size for layer in layers for part, size in lacking.items()}
