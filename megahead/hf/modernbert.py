"""Hugging Face's names of parameters and settings of ModernBERT (mmBERT is one), and of ModernBERT decoders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megahead.config.model import ModelConfig
from megahead.hf.families import (
    COMMON_SETTINGS,
    GELU_NAMES,
    GLOBAL,
    LOCAL,
    QUERY_KEY_VALUE_MODULES,
    Family,
    ParameterNames,
    SettingNames,
    global_interval,
    layer_types,
    require_key,
)

_MODERNBERT_NAMES: dict[str | tuple[str, ...], str] = {
    "backbone.embedding": "model.embeddings.tok_embeddings",
    "backbone.embedding_norm": "model.embeddings.norm",
    "backbone.blocks.*.attention_norm": "model.layers.*.attn_norm",
    "backbone.blocks.*.attention.output": "model.layers.*.attn.Wo",
    "backbone.blocks.*.mlp_norm": "model.layers.*.mlp_norm",
    ("backbone.blocks.*.mlp.gate", "backbone.blocks.*.mlp.up"): "model.layers.*.mlp.Wi",
    "backbone.blocks.*.mlp.down": "model.layers.*.mlp.Wo",
    "backbone.final_norm": "model.final_norm",
    "mask_head.bias": "decoder.bias",
    "head.weight": "decoder.weight",
}
_MODERNBERT = SettingNames(
    COMMON_SETTINGS
    | {
        "norm_eps": "norm_eps",
        "hidden_dropout": "embedding_dropout",
        "attention_dropout": "attention_dropout",
        "local_window": "local_attention",
        "transform_bias": "classifier_bias",
    },
    activation="hidden_activation",
    defaults={"family": "modernbert"},
    required_values={"norm_bias": False, "attention_bias": False, "mlp_bias": False, "decoder_bias": True},
)
_ROPE_BASES = {
    GLOBAL: ("rotary_base", "global_rope_theta", 160_000.0),
    LOCAL: ("local_rotary_base", "local_rope_theta", 1e4),
}
"""By layer type: the setting of the base, its legacy key in config.json, and its default."""


def modernbert_config(model: ModelConfig) -> dict[str, Any]:
    """Returns the content of `config.json` for the shape of `model`.

    Layer types and their rotary bases appear twice: `layer_types` and `rope_parameters` for transformers 5, the other
    three for older versions.
    """
    settings = _MODERNBERT.hf_config(model)
    bases = {layer_type: getattr(model, name) for layer_type, (name, _, _) in _ROPE_BASES.items()}
    return {
        "model_type": "modernbert",
        **settings,
        "mlp_dropout": model.hidden_dropout,
        "classifier_activation": settings["hidden_activation"],
        "layer_types": layer_types(model.num_layers, model.global_every, offset=0),
        "rope_parameters": {name: {"rope_type": "default", "rope_theta": base} for name, base in bases.items()},
        "global_attn_every_n_layers": model.global_every,
        **{legacy_key: bases[layer_type] for layer_type, (_, legacy_key, _) in _ROPE_BASES.items()},
    }


def modernbert_settings(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a ModelConfig; FieldError for what our ModernBERT does not support."""
    settings = _MODERNBERT.model_settings(hf_config)
    transform = hf_config.get("classifier_activation", "gelu")
    rule = f"be {hf_config.get('hidden_activation', 'gelu')}, as hidden_activation"
    require_key(GELU_NAMES.get(transform) == settings["activation"], "classifier_activation", rule, got=transform)
    dropout, mlp_dropout = hf_config.get("embedding_dropout", 0.0), hf_config.get("mlp_dropout", 0.0)
    require_key(dropout == mlp_dropout, "mlp_dropout", f"be {dropout:g}, as embedding_dropout", got=mlp_dropout)
    return {
        **settings,
        "global_every": global_interval(hf_config, "global_attn_every_n_layers", default=3, offset=0),
        **{name: _rope_base(hf_config, layer_type) for layer_type, (name, _, _) in _ROPE_BASES.items()},
    }


def _rope_base(hf_config: Mapping[str, Any], layer_type: str) -> float:
    """Returns the rotary base of a layer type; FieldError for scaled frequencies."""
    _, legacy_key, default = _ROPE_BASES[layer_type]
    rope = {**((hf_config.get("rope_parameters") or {}).get(layer_type) or {}), **(hf_config.get("rope_scaling") or {})}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    require_key(rope_type == "default", f"rope_parameters.{layer_type}.rope_type", "be default", got=rope_type)
    return float(rope.get("rope_theta", hf_config.get(legacy_key, default)))


MODERNBERT = Family(
    title="ModernBERT",
    class_prefix="ModernBert",
    head_type="MaskedLM",
    base_model_prefix="model.",
    names=ParameterNames(
        _MODERNBERT_NAMES
        | {
            QUERY_KEY_VALUE_MODULES: "model.layers.*.attn.Wqkv",
            "mask_head.dense": "head.dense",
            "mask_head.norm": "head.norm",
        }
    ),
    ignored_keys=("rotary_emb.", "inv_freq"),
    head_prefixes=("head.", "decoder."),
    model_settings=modernbert_settings,
    hf_config=modernbert_config,
)


# ModernBERT decoders: where they differ from encoders (Weller et al. 2025, arXiv 2507.11412).

_WINDOW_OFFSET = 2
"""Hugging Face's `local_attention` minus megahead's `local_window`. Both are twice the number of tokens that a token
sees in a local layer; Hugging Face counts the token itself, megahead does not."""


def modernbert_decoder_config(model: ModelConfig) -> dict[str, Any]:
    """Returns the content of `config.json` for the shape of `model`."""
    window = {"local_attention": model.local_window + _WINDOW_OFFSET}
    return modernbert_config(model) | {"model_type": "modernbert-decoder"} | window


def modernbert_decoder_settings(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a ModelConfig; FieldError for what our ModernBERT does not support."""
    window = hf_config.get("local_attention", 128)
    is_window = isinstance(window, int) and window >= 4 and not window % 2
    require_key(is_window, "local_attention", "be an even number of at least 4", got=window)
    settings = modernbert_settings({**hf_config, "local_attention": window - _WINDOW_OFFSET})
    return {**settings, "is_causal": True}


MODERNBERT_DECODER = replace(
    MODERNBERT,
    title="ModernBERT decoder",
    class_prefix="ModernBertDecoder",
    head_type="CausalLM",
    names=ParameterNames(
        _MODERNBERT_NAMES
        | {
            "backbone.blocks.*.attention.query": "model.layers.*.attn.q_proj",
            "backbone.blocks.*.attention.key": "model.layers.*.attn.k_proj",
            "backbone.blocks.*.attention.value": "model.layers.*.attn.v_proj",
            "mask_head.dense": "lm_head.dense",
            "mask_head.norm": "lm_head.norm",
        }
    ),
    head_prefixes=("lm_head.", "decoder."),
    model_settings=modernbert_decoder_settings,
    hf_config=modernbert_decoder_config,
)
