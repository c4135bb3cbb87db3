"""Hugging Face's names of parameters and settings of Gemma 3's text model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megahead.config.model import ModelConfig
from megahead.errors import FieldError
from megahead.hf.families import COMMON_SETTINGS, GELU_NAMES, Family, ParameterNames, SettingNames
from megahead.hf.llama import LLAMA_NAMES, rotary_parameters, rotary_settings

_GLOBAL, _LOCAL = "full_attention", "sliding_attention"
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
    fixed={"attention_bias": False},
)


def gemma3_config(model: ModelConfig) -> dict[str, Any]:
    """Returns the content of `config.json` for the shape of `model`.

    Layer types and rotary settings appear twice: `layer_types` and `rope_parameters` for transformers 5, the last four
    for older versions.
    """
    rope = rotary_parameters(model)
    scaling = None if model.rotary_scaling is None else {key: rope[key] for key in rope if key != "rope_theta"}
    local_rope = {"rope_type": "default", "rope_theta": model.local_rotary_base}
    return {
        "model_type": "gemma3_text",
        **_GEMMA3.hf_config(model),
        "query_pre_attn_scalar": model.query_scalar(),
        "use_cache": True,
        "layer_types": _layer_types(model.num_layers, model.global_every),
        "rope_parameters": {_GLOBAL: rope, _LOCAL: local_rope},
        "sliding_window_pattern": model.global_every,
        "rope_theta": model.rotary_base,
        "rope_local_base_freq": model.local_rotary_base,
        "rope_scaling": scaling,
    }


def gemma3_settings(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a ModelConfig; FieldError for what our Gemma 3 does not support."""
    for name in ("final_logit_softcapping", "attn_logit_softcapping"):
        if hf_config.get(name) is not None:
            raise FieldError(f"config.json: {name}", "be null", got=hf_config[name])
    if hf_config.get("use_bidirectional_attention"):
        raise FieldError("config.json: use_bidirectional_attention", "be false", got="true")
    window = hf_config.get("sliding_window", 4096)
    if not isinstance(window, int) or window % 2:
        raise FieldError("config.json: sliding_window", "be an even number of tokens", got=window)
    settings, ropes = _GEMMA3.model_settings(hf_config), hf_config.get("rope_parameters") or {}
    local_rope, global_rope = ropes.get(_LOCAL) or {}, ropes.get(_GLOBAL) or {}
    if (rope_type := local_rope.get("rope_type", "default")) != "default":
        raise FieldError(f"config.json: rope_parameters.{_LOCAL}.rope_type", "be default", got=rope_type)
    global_base = {"rope_theta": hf_config.get("rope_theta", _GLOBAL_BASE)}
    scalar = hf_config.get("query_pre_attn_scalar", 256)
    return {
        **settings,
        "query_pre_attn_scalar": None if scalar == settings["head_dim"] else scalar,
        "global_every": _global_interval(hf_config),
        "local_rotary_base": local_rope.get("rope_theta", hf_config.get("rope_local_base_freq", _LOCAL_BASE)),
        **rotary_settings({**hf_config, **global_base, "rope_parameters": global_rope}),
    }


def _global_interval(hf_config: Mapping[str, Any]) -> int:
    """Returns the distance from one layer with global attention to the next."""
    num_layers, layer_types = hf_config["num_hidden_layers"], hf_config.get("layer_types")
    interval = int(hf_config.get("sliding_window_pattern", 6))
    if layer_types is None:
        return interval
    interval = list(layer_types).index(_GLOBAL) + 1 if _GLOBAL in layer_types else max(interval, num_layers + 1)
    if list(layer_types) != _layer_types(num_layers, interval):
        raise FieldError("config.json: layer_types", f"be {_GLOBAL} at equal distances", got="another list")
    return interval


def _layer_types(num_layers: int, interval: int) -> list[str]:
    return [_LOCAL if (layer + 1) % interval else _GLOBAL for layer in range(num_layers)]


GEMMA3 = Family(
    title="Gemma 3",
    class_prefix="Gemma3Text",
    class_with_head="Gemma3ForCausalLM",
    head_type="CausalLM",
    base_model_prefix="model.",
    head_prefixes=("lm_head.",),
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
    modules_on_disk=("embed_tokens", "layers"),
    modules_on_cpu=("norm", "rotary_emb"),
)
