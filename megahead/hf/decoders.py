"""What Hugging Face calls the parts and settings of GPT-NeoX, Llama, Qwen 2, Qwen 3, Mistral, and ERNIE 4.5."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from megahead.config.model import ModelConfig
from megahead.errors import FieldError
from megahead.hf.families import GELU, SILU, USUAL, Family, Renames, SettingNames

_GPT_NEOX = SettingNames(
    USUAL
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
    """The content of `config.json` for the shape of `model`.

    Rotary settings appear twice: `rope_parameters` for transformers 5, `rotary_*` for older readers.
    """
    rope = {"rope_type": "default", "rope_theta": model.rotary_base, "partial_rotary_factor": model.rotary_pct}
    older = {"rotary_pct": model.rotary_pct, "rotary_emb_base": model.rotary_base}
    return {**_GPT_NEOX.config(model), "use_cache": True, "rope_parameters": rope, **older}


def gpt_neox_settings(content: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a ModelConfig that a `config.json` gives; FieldError for what our GPT-NeoX has not."""
    known = _GPT_NEOX.settings(content)
    rope = content.get("rope_parameters") or {}
    scaling = content.get("rope_scaling") or rope
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind != "default":
        raise FieldError("config.json: rope_parameters.rope_type", "be default (no scaling)", got=kind)
    return known | {
        "rotary_pct": rope.get("partial_rotary_factor", content.get("rotary_pct", 0.25)),
        "rotary_base": rope.get("rope_theta", content.get("rotary_emb_base", 10000.0)),
    }


GPT_NEOX = Family(
    title="GPT-NeoX",
    classes="GPTNeoX",
    predicts="CausalLM",
    prefix="gpt_neox.",
    heads=("embed_out.",),
    table=Renames(
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
    settings=gpt_neox_settings,
    config=gpt_neox_config,
    ignored=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),  # buffers that old versions stored
    older=(("lm_head.weight", "embed_out.weight"),),
)


# Llama; Qwen 2, Qwen 3 and Mistral, which are settings of it. A Mistral is exported as a Llama, whose blocks it has.

_LLAMA = SettingNames(
    USUAL
    | {
        "num_key_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "norm_eps": "rms_norm_eps",
        "attention_dropout": "attention_dropout",
    },
    activations=SILU | GELU,
    defaults={"family": "llama", "norm_eps": 1e-6, "max_positions": 2048},
)
_OTHERS = replace(_LLAMA, needed=(*_LLAMA.needed, "num_key_heads"))
_SCALING = {
    "factor": "factor",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "original_positions": "original_max_position_embeddings",
}


def kind_of(model: ModelConfig) -> str:
    """The `model_type` that has all that `model` has."""
    if model.qk_norm:
        return "qwen3"
    return "qwen2" if model.attention_bias == "qkv" else "llama"


def llama_config(model: ModelConfig) -> dict[str, Any]:
    """The content of `config.json` for the shape of `model`, of the kind that `kind_of` names.

    Rotary settings appear twice: `rope_parameters` for transformers 5, the others for older readers; llama.cpp looks
    for the positions of `llama3` beside them.
    """
    kind, ours = kind_of(model), model.rotary_scaling
    scaling: dict[str, Any] = {}
    if ours is not None:
        given = ("factor",) if ours.kind == "linear" else tuple(_SCALING)
        scaling = {"rope_type": ours.kind} | {_SCALING[name]: getattr(ours, name) for name in given}
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
    return {"model_type": kind, **_LLAMA.config(model), **rotary, **biases, "use_cache": True}


def llama_settings(kind: str) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """For a `model_type`: the settings of a ModelConfig that its `config.json` gives; FieldError for what our Llama
    has not."""

    def settings(content: Mapping[str, Any]) -> dict[str, Any]:
        known = (_LLAMA if kind == "llama" else _OTHERS).settings(content)
        window = content.get("sliding_window", 4096 if kind == "mistral" else None)
        if window is not None and (kind == "mistral" or content.get("use_sliding_window", False)):
            raise FieldError("config.json: sliding_window", "be null (each token sees all before it)", got=window)
        if any(layer != "full_attention" for layer in content.get("layer_types") or ()):
            raise FieldError("config.json: layer_types", "be full_attention for all", got="others")
        return {
            **({"head_dim": 128} if kind == "qwen3" else {}),
            **known,
            "qk_norm": kind == "qwen3",
            "attention_bias": "qkv" if kind == "qwen2" else "all" if content.get("attention_bias", False) else "none",
            "mlp_bias": kind == "llama" and content.get("mlp_bias", False),
            **_rotary(content),
        }

    return settings


def _rotary(content: Mapping[str, Any]) -> dict[str, Any]:
    """rotary_base, and rotary_scaling where there is any."""
    given = {**(content.get("rope_parameters") or {}), **(content.get("rope_scaling") or {})}
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        rule = "be default, linear or llama3"
        raise FieldError("config.json: rope_parameters.rope_type", rule, got=kind)
    share = given.get("partial_rotary_factor", content.get("partial_rotary_factor", 1.0))
    if share != 1.0:
        raise FieldError("config.json: partial_rotary_factor", "be 1", got=share)
    base = {"rotary_base": given.get("rope_theta", content.get("rope_theta", 10000.0))}
    if kind == "default":
        return base
    wanted = ("factor",) if kind == "linear" else tuple(_SCALING)
    given.setdefault("original_max_position_embeddings", content.get("max_position_embeddings", 2048))
    for name in wanted:
        if _SCALING[name] not in given:
            raise FieldError(f"config.json: rope_parameters.{_SCALING[name]}", f"be given for {kind}", got="missing")
    return {**base, "rotary_scaling": {"kind": kind, **{name: given[_SCALING[name]] for name in wanted}}}


LLAMA = Family(
    title="Llama",
    classes="Llama",
    predicts="CausalLM",
    prefix="model.",
    heads=("lm_head.",),
    table=Renames(
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
    ),
    settings=llama_settings("llama"),
    config=llama_config,
    ignored=(".rotary_emb.inv_freq",),  # a buffer that old versions stored
)


# A Llama whose head has a bias: ERNIE 4.5 of Hugging Face without its experts.
#
# No class that Hugging Face calls Llama or Qwen has a bias in its head, and behind an RMS norm none can be folded in:
# its outputs lie on an ellipsoid around 0, on which no linear form is constant. `Ernie4_5_MoeForCausalLM` has all
# blocks of a Llama, and biases everywhere with `use_bias`, the head included; those that a Llama lacks are stored as
# zeros. Its rotary positions turn neighbours, 2i and 2i + 1, where Llama's turn i and i + d/2 (of d dimensions of a
# head): rows of queries and keys change places. The function stays the same, number by number. It has no norms of
# queries and keys.


def ernie_config(model: ModelConfig) -> dict[str, Any]:
    """The content of `config.json` for the shape of `model`."""
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


def ernie_as_stored(model: ModelConfig, name: str, tensor: Tensor) -> Tensor:
    """Our parameter `name` as ERNIE stores it: rows of queries and keys in the order of its rotary positions."""
    if not name.rpartition(".")[0].endswith(("attention.query", "attention.key")):
        return tensor
    pairs: Tensor = tensor.unflatten(0, (-1, 2, model.head_size() // 2)).transpose(1, 2)  # heads, pairs, halves
    return pairs.flatten(0, 2)


def ernie_zeros(model: ModelConfig) -> dict[str, int]:
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


_KINDS = {"mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
_LLAMAS = {k: replace(LLAMA, title=title, classes=title, settings=llama_settings(k)) for k, title in _KINDS.items()}
FAMILIES = {"gpt_neox": GPT_NEOX, "llama": LLAMA, **_LLAMAS}
"""By `model_type`."""

_LLAMA_WITH_HEAD_BIAS = replace(
    LLAMA,
    title="Llama (as an ERNIE 4.5 without experts, whose head has a bias)",
    classes="Ernie4_5_Moe",
    config=ernie_config,
    head_bias="lm_head.bias",
    as_stored=ernie_as_stored,
    zeros=ernie_zeros,
)


def decoder_of(model: ModelConfig, *, head_bias: bool = False) -> Family:
    """The kind that `model` is exported as: a Llama is what its settings say, and with a bias of its head an ERNIE."""
    if model.family == "gpt_neox":
        return GPT_NEOX
    return _LLAMA_WITH_HEAD_BIAS if head_bias else FAMILIES[kind_of(model)]
