"""Hugging Face's names of parameters and settings of decoders: GPT-NeoX, GPT-2, Llama, ERNIE 4.5, and Gemma 3.

Qwen 2, Qwen 3 and Mistral are Llamas with other settings. A Mistral is exported as a Llama.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from megahead.config.model import ModelConfig
from megahead.hf.families import (
    COMMON_SETTINGS,
    GELU_NAMES,
    GLOBAL,
    LOCAL,
    QUERY_KEY_VALUE_MODULES,
    SILU_NAMES,
    Family,
    ParameterNames,
    SettingNames,
    global_interval,
    layer_types,
    require_key,
    rope_type_of,
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
    rope_type = rope_type_of(rope)
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
    require_key(dropout == embedding_dropout, "embd_pdrop", f"be {dropout}, as resid_pdrop", got=embedding_dropout)
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


# Llama, with Qwen 2, Qwen 3 and Mistral.

_LLAMA = SettingNames(
    COMMON_SETTINGS
    | {
        "num_key_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "norm_eps": "rms_norm_eps",
        "attention_dropout": "attention_dropout",
    },
    activations=SILU_NAMES | GELU_NAMES,
    defaults={"family": "llama", "norm_eps": 1e-6, "max_positions": 2048},
)
_SCALING_NAMES = {
    "factor": "factor",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "original_positions": "original_max_position_embeddings",
}


def model_type_of(model: ModelConfig) -> str:
    """Returns the `model_type` of a Llama that supports all settings of `model`."""
    if model.qk_norm:
        return "qwen3"
    return "qwen2" if model.attention_bias == "qkv" else "llama"


def llama_config(model: ModelConfig) -> dict[str, Any]:
    """Returns the content of `config.json` for the shape of `model`; its `model_type` is that of `model_type_of`.

    Rotary settings appear twice: `rope_parameters` for transformers 5, the others for older versions; llama.cpp reads
    `original_max_position_embeddings`, of `llama3` scaling, from the top level.
    """
    model_type, rope = model_type_of(model), rotary_parameters(model)
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    rotary = {
        "rope_parameters": rope,
        "rope_theta": model.rotary_base,
        "rope_scaling": None if model.rotary_scaling is None else scaling,
    }
    rotary |= {name: value for name, value in scaling.items() if name == _SCALING_NAMES["original_positions"]}
    biases: dict[str, Any] = {
        "llama": {"attention_bias": model.attention_bias == "all", "mlp_bias": model.mlp_bias},
        "qwen2": {"use_sliding_window": False},
        "qwen3": {"attention_bias": model.attention_bias == "all", "use_sliding_window": False},
    }[model_type]
    return {"model_type": model_type, **_LLAMA.hf_config(model), **rotary, **biases, "use_cache": True}


def rotary_parameters(model: ModelConfig) -> dict[str, Any]:
    """Returns the base and scaling of the rotary frequencies as transformers 5 has them."""
    scaling = model.rotary_scaling
    if scaling is None:
        return {"rope_type": "default", "rope_theta": model.rotary_base}
    factors = {hf_name: getattr(scaling, name) for name, hf_name in _scaling_names(scaling.kind).items()}
    return {"rope_type": scaling.kind, **factors, "rope_theta": model.rotary_base}


def llama_settings(hf_config: Mapping[str, Any], *, model_type: str) -> dict[str, Any]:
    """Returns the settings of a ModelConfig; FieldError for what our Llama does not support."""
    settings = _LLAMA.model_settings(hf_config)
    has_key_heads = model_type == "llama" or "num_key_value_heads" in hf_config  # null means num_attention_heads
    require_key(has_key_heads, "num_key_value_heads", "be given", got="missing")
    window = hf_config.get("sliding_window", None if model_type == "llama" else 4096)
    is_full_attention = window is None or not (model_type == "mistral" or hf_config.get("use_sliding_window", False))
    require_key(is_full_attention, "sliding_window", "be null (each token sees all before it)", got=window)
    is_global = set(hf_config.get("layer_types") or ()) <= {GLOBAL}
    require_key(is_global, "layer_types", f"be {GLOBAL} for all", got="others")
    has_all_biases = hf_config.get("attention_bias", False)
    rope = hf_config.get("rope_scaling") or hf_config.get("rope_parameters") or {}  # the older key, if there are both
    positions_name = _SCALING_NAMES["original_positions"]
    if hf_config.get(positions_name) is not None:
        rope = {**rope, positions_name: hf_config[positions_name]}  # which transformers prefers
    return {
        **({"head_dim": 128} if model_type == "qwen3" else {}),
        **settings,
        "qk_norm": model_type == "qwen3",
        "attention_bias": "qkv" if model_type == "qwen2" else "all" if has_all_biases else "none",
        "mlp_bias": model_type == "llama" and hf_config.get("mlp_bias", False),
        **rotary_settings({**hf_config, "rope_scaling": None, "rope_parameters": rope}),
    }


def _scaling_names(kind: str) -> dict[str, str]:
    return {"factor": "factor"} if kind == "linear" else _SCALING_NAMES


def rotary_settings(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns rotary_base, and rotary_scaling if the frequencies are scaled."""
    rope = {**(hf_config.get("rope_parameters") or {}), **(hf_config.get("rope_scaling") or {})}
    rope_type = rope_type_of(rope)
    is_known = rope_type in ("default", "linear", "llama3")
    require_key(is_known, "rope_parameters.rope_type", "be default, linear or llama3", got=rope_type)
    rotary_pct = rope.get("partial_rotary_factor", hf_config.get("partial_rotary_factor", 1.0))
    require_key(rotary_pct == 1.0, "partial_rotary_factor", "be 1", got=rotary_pct)
    base = {"rotary_base": rope.get("rope_theta", hf_config.get("rope_theta", 10000.0))}
    if rope_type == "default":
        return base
    rope.setdefault("original_max_position_embeddings", hf_config.get("max_position_embeddings", 2048))
    names = _scaling_names(rope_type)
    for hf_name in names.values():
        require_key(hf_name in rope, f"rope_parameters.{hf_name}", f"be given for {rope_type}", got="missing")
    return {**base, "rotary_scaling": {"kind": rope_type, **{name: rope[hf_name] for name, hf_name in names.items()}}}


LLAMA_NAMES: dict[str | tuple[str, ...], str] = {
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

LLAMA = Family(
    title="Llama",
    class_prefix="Llama",
    head_type="CausalLM",
    base_model_prefix="model.",
    head_prefixes=("lm_head.",),
    names=ParameterNames(LLAMA_NAMES),
    model_settings=partial(llama_settings, model_type="llama"),
    hf_config=llama_config,
    disk_offloaded_modules=("embed_tokens", "layers"),  # under `offload_folder`
    cpu_modules=("norm", "rotary_emb"),
    ignored_keys=(".rotary_emb.inv_freq",),  # a buffer of old versions
)


# A Llama whose head has a bias: ERNIE 4.5 of Hugging Face without its experts.
#
# No class that Hugging Face calls Llama or Qwen has a bias in its head, and behind an RMS norm none can be folded in:
# its outputs are on an ellipsoid around 0, on which no linear form is constant. `Ernie4_5_MoeForCausalLM` has all
# blocks of a Llama, and with `use_bias` biases everywhere, the head included; biases that the Llama lacks are stored as
# zeros. ERNIE's rotary embedding rotates the dimensions 2i and 2i + 1 of a head, Llama's i and i + d/2 (of d): the rows
# of queries and keys are permuted, which leaves outputs exactly the same. ERNIE has no norms of queries and keys.


def ernie_config(model: ModelConfig) -> dict[str, Any]:
    """Returns the content of `config.json` for the shape of `model`."""
    hf_config = llama_config(model)
    for name in ("attention_bias", "mlp_bias", "attention_dropout", "use_sliding_window"):
        hf_config.pop(name, None)
    no_experts = {
        "moe_layer_start_index": model.num_layers,
        "moe_layer_end_index": model.num_layers,
        "moe_num_experts": 1,
        "moe_num_shared_experts": 0,
        "moe_k": 1,
        "moe_intermediate_size": model.mlp_size(),
    }
    return {**hf_config, **no_experts, "model_type": "ernie4_5_moe", "use_bias": True}


def ernie_tensor(model: ModelConfig, name: str, tensor: Tensor) -> Tensor:
    """Returns the parameter `name` as ERNIE stores it, with rows of queries and keys in its rotary order."""
    if not name.rpartition(".")[0].endswith(("attention.query", "attention.key")):
        return tensor
    pairs: Tensor = tensor.unflatten(0, (-1, 2, model.head_size() // 2)).transpose(1, 2)  # heads, pairs, halves
    return pairs.flatten(0, 2)


_TITLES = {"mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
LLAMAS = {"llama": LLAMA} | {
    name: replace(LLAMA, title=title, class_prefix=title, model_settings=partial(llama_settings, model_type=name))
    for name, title in _TITLES.items()
}
"""By `model_type`."""

LLAMA_WITH_HEAD_BIAS = replace(
    LLAMA,
    title="Llama (as an ERNIE 4.5 without experts, whose head has a bias)",
    class_prefix="Ernie4_5_Moe",
    hf_config=ernie_config,
    head_bias_name="lm_head.bias",
    to_hf_tensor=ernie_tensor,
    weights_with_bias=("_proj.weight",),
)


# Gemma 3's text model.

_GLOBAL_BASE, _LOCAL_BASE = 1e6, 1e4  # where config.json has none

_GEMMA3 = SettingNames(
    COMMON_SETTINGS
    | {
        "num_key_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "local_window": "sliding_window",
        "norm_eps": "rms_norm_eps",
        "attention_dropout": "attention_dropout",
    },
    activation="hidden_activation",
    activations={"gelu_pytorch_tanh": "gelu_tanh", **GELU_NAMES},
    defaults={"family": "gemma3", "num_key_heads": 4, "head_dim": 256, "local_window": 4096, "max_positions": 131_072},
    required_values={"attention_bias": False},
)


def gemma3_config(model: ModelConfig) -> dict[str, Any]:
    """Returns the content of `config.json` for the shape of `model`.

    `layer_types` and `rope_parameters` are for transformers 5, the last four, which say the same, for older versions.
    """
    rope = rotary_parameters(model)
    scaling = None if model.rotary_scaling is None else {key: rope[key] for key in rope if key != "rope_theta"}
    local_rope = {"rope_type": "default", "rope_theta": model.local_rotary_base}
    return {
        "model_type": "gemma3_text",
        **_GEMMA3.hf_config(model),
        "query_pre_attn_scalar": model.query_scalar(),
        "use_cache": True,
        "layer_types": layer_types(model.num_layers, model.global_every, offset=1),
        "rope_parameters": {GLOBAL: rope, LOCAL: local_rope},
        "sliding_window_pattern": model.global_every,
        "rope_theta": model.rotary_base,
        "rope_local_base_freq": model.local_rotary_base,
        "rope_scaling": scaling,
    }


def gemma3_settings(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a ModelConfig; FieldError for what our Gemma 3 does not support."""
    for name in ("final_logit_softcapping", "attn_logit_softcapping"):
        require_key(hf_config.get(name) is None, name, "be null", got=hf_config.get(name))
    is_causal = not hf_config.get("use_bidirectional_attention")
    require_key(is_causal, "use_bidirectional_attention", "be false", got="true")
    window = hf_config.get("sliding_window", 4096)
    is_even = isinstance(window, int) and not window % 2
    require_key(is_even, "sliding_window", "be an even number of tokens", got=window)
    settings, ropes = _GEMMA3.model_settings(hf_config), hf_config.get("rope_parameters") or {}
    local_rope, global_rope = ropes.get(LOCAL) or {}, ropes.get(GLOBAL) or {}
    rope_type = rope_type_of(local_rope)
    require_key(rope_type == "default", f"rope_parameters.{LOCAL}.rope_type", "be default", got=rope_type)
    global_base = {"rope_theta": hf_config.get("rope_theta", _GLOBAL_BASE)}
    scalar = hf_config.get("query_pre_attn_scalar", 256)
    return {
        **settings,
        "query_pre_attn_scalar": None if scalar == settings["head_dim"] else scalar,
        "global_every": global_interval(hf_config, "sliding_window_pattern", default=6, offset=1),
        "local_rotary_base": local_rope.get("rope_theta", hf_config.get("rope_local_base_freq", _LOCAL_BASE)),
        **rotary_settings({**hf_config, **global_base, "rope_parameters": global_rope}),
    }


GEMMA3 = replace(
    LLAMA,
    title="Gemma 3",
    class_prefix="Gemma3Text",
    class_with_head="Gemma3ForCausalLM",
    names=ParameterNames(
        LLAMA_NAMES
        | {
            "backbone.blocks.*.attention_output_norm": "model.layers.*.post_attention_layernorm",
            "backbone.blocks.*.mlp_norm": "model.layers.*.pre_feedforward_layernorm",
            "backbone.blocks.*.mlp_output_norm": "model.layers.*.post_feedforward_layernorm",
        }
    ),
    model_settings=gemma3_settings,
    hf_config=gemma3_config,
    is_tied_by_default=True,
)

DECODERS = {"gpt_neox": GPT_NEOX, **LLAMAS, "gpt2": GPT2, "gemma3_text": GEMMA3}
"""The decoders that are imported and exported, by `model_type`."""
