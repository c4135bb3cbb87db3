"""Hugging Face's names of parameters and settings of GPT-2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megahead.config.model import ModelConfig
from megahead.errors import FieldError
from megahead.hf.families import GELU_NAMES, Family, ParameterNames, SettingNames

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
    fixed={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
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
    if dropout != embedding_dropout:
        raise FieldError("config.json: embd_pdrop", f"be {dropout:g}, as resid_pdrop", got=embedding_dropout)
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
            (
                "backbone.blocks.*.attention.query",
                "backbone.blocks.*.attention.key",
                "backbone.blocks.*.attention.value",
            ): "transformer.h.*.attn.c_attn",
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
    modules_on_disk=("wte", "h"),
    modules_on_cpu=("wpe", "drop", "ln_f"),
)
