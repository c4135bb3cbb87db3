"""Hugging Face's names of parameters and settings of GPT-NeoX and GPT-2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megahead.config.model import ModelConfig
from megahead.hf.families import (
    COMMON_SETTINGS,
    GELU_NAMES,
    QUERY_KEY_VALUE_MODULES,
    Family,
    ParameterNames,
    SettingNames,
    require_key,
)

_GPT_NEOX = SettingNames(
    COMMON_SETTINGS
    | {
        "parallel_residual": "use_parallel_residual",
        "norm_eps": "layer_norm_eps",
        "hidden_dropout": "hidden_dropout",
        "attention_dropout": "attention_dropout",
    },
    defaults={"family": "gpt_neox"},
    required_values={"model_type": "gpt_neox", "attention_bias": True},
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
    rope = hf_config.get("rope_scaling") or hf_config.get("rope_parameters") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    require_key(rope_type == "default", "rope_parameters.rope_type", "be default (no scaling)", got=rope_type)
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
    disk_offloaded_modules=("embed_in", "layers"),
    cpu_modules=("final_layer_norm", "rotary_emb", "emb_dropout"),
    legacy_keys=(("lm_head.weight", "embed_out.weight"),),
)


# GPT-2.

_GPT2 = SettingNames(
    {
        "num_layers": "n_layer",
        "hidden_size": "n_embd",
        "num_heads": "n_head",
        "intermediate_size": "n_inner",
        "vocab_size": "vocab_size",
        "max_positions": "n_positions",
        "norm_eps": "layer_norm_epsilon",
        "hidden_dropout": "resid_pdrop",
        "attention_dropout": "attn_pdrop",
        "init_std": "initializer_range",
    },
    activation="activation_function",
    activations={"gelu_new": "gelu_tanh", **GELU_NAMES},
    required=("num_layers", "hidden_size", "num_heads", "vocab_size"),
    defaults={"family": "gpt2"},
    required_values={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
)


def gpt2_config(model: ModelConfig) -> dict[str, Any]:
    """Returns the content of `config.json` for the shape of `model`."""
    settings = _GPT2.hf_config(model)
    if model.activation == "gelu_tanh":
        settings["activation_function"] = "gelu_new"  # the published name
    settings |= {"n_ctx": model.max_positions}  # an old name of n_positions, which llama.cpp's converter reads
    return {"model_type": "gpt2", **settings, "embd_pdrop": model.hidden_dropout, "use_cache": True}


def gpt2_settings(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a ModelConfig; FieldError for what our GPT-2 does not support."""
    dropout, embedding_dropout = hf_config.get("resid_pdrop", 0.1), hf_config.get("embd_pdrop", 0.1)
    require_key(dropout == embedding_dropout, "embd_pdrop", f"be {dropout:g}, as resid_pdrop", got=embedding_dropout)
    return _GPT2.model_settings(hf_config)


GPT2 = Family(
    title="GPT-2",
    class_prefix="GPT2",
    class_with_head="GPT2LMHeadModel",
    head_type="CausalLM",
    base_model_prefix="transformer.",
    head_prefixes=("lm_head.",),
    names=ParameterNames(
        {
            "backbone.embedding": "transformer.wte",
            "backbone.positions": "transformer.wpe",
            "backbone.blocks.*.attention_norm": "transformer.h.*.ln_1",
            QUERY_KEY_VALUE_MODULES: "transformer.h.*.attn.c_attn",  # three modules of ours, stacked in one tensor
            "backbone.blocks.*.attention.output": "transformer.h.*.attn.c_proj",
            "backbone.blocks.*.mlp_norm": "transformer.h.*.ln_2",
            "backbone.blocks.*.mlp.up": "transformer.h.*.mlp.c_fc",
            "backbone.blocks.*.mlp.down": "transformer.h.*.mlp.c_proj",
            "backbone.final_norm": "transformer.ln_f",
            "head": "lm_head",
        }
    ),
    transposed_names=(".c_attn.weight", ".c_proj.weight", ".c_fc.weight"),
    model_settings=gpt2_settings,
    hf_config=gpt2_config,
    ignored_keys=(".attn.bias", ".attn.masked_bias"),  # buffers of old versions
    is_tied_by_default=True,
    disk_offloaded_modules=("wte", "h"),
    cpu_modules=("wpe", "drop", "ln_f"),
)
