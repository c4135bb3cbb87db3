"""Hugging Face's names of parameters and settings of GPT-NeoX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megahead.config.model import ModelConfig
from megahead.errors import FieldError
from megahead.hf.families import COMMON_SETTINGS, Family, ParameterNames, SettingNames

_GPT_NEOX = SettingNames(
    COMMON_SETTINGS
    | {
        "parallel_residual": "use_parallel_residual",
        "norm_eps": "layer_norm_eps",
        "hidden_dropout": "hidden_dropout",
        "attention_dropout": "attention_dropout",
    },
    defaults={
        "family": "gpt_neox",
        "max_positions": 2048,
        "parallel_residual": True,
        "norm_eps": 1e-5,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_std": 0.02,
    },
    fixed={"model_type": "gpt_neox", "attention_bias": True},
)


def gpt_neox_config(model: ModelConfig) -> dict[str, Any]:
    """Returns the content of `config.json` for the shape of `model`.

    Rotary settings appear twice: `rope_parameters` for transformers 5, `rotary_*` for older versions.
    """
    rope = {"rope_type": "default", "rope_theta": model.rotary_base, "partial_rotary_factor": model.rotary_pct}
    legacy = {"rotary_pct": model.rotary_pct, "rotary_emb_base": model.rotary_base}
    return {**_GPT_NEOX.hf_config(model), "use_cache": True, "rope_parameters": rope, **legacy}


def gpt_neox_settings(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a ModelConfig; FieldError for what our GPT-NeoX does not support."""
    settings = _GPT_NEOX.model_settings(hf_config)
    rope = hf_config.get("rope_parameters") or {}
    scaling = hf_config.get("rope_scaling") or rope
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    if rope_type != "default":
        raise FieldError("config.json: rope_parameters.rope_type", "be default (no scaling)", got=rope_type)
    return settings | {
        "rotary_pct": rope.get("partial_rotary_factor", hf_config.get("rotary_pct", 0.25)),
        "rotary_base": rope.get("rope_theta", hf_config.get("rotary_emb_base", 10000.0)),
    }


GPT_NEOX = Family(
    title="GPT-NeoX",
    class_prefix="GPTNeoX",
    head_type="CausalLM",
    base_model_prefix="gpt_neox.",
    head_prefixes=("embed_out.",),
    names=ParameterNames(
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
    ),
    model_settings=gpt_neox_settings,
    hf_config=gpt_neox_config,
    ignored_keys=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),  # buffers of old versions
    modules_on_disk=("embed_in", "layers"),
    modules_on_cpu=("final_layer_norm", "rotary_emb", "emb_dropout"),
    legacy_keys=(("lm_head.weight", "embed_out.weight"),),
)
