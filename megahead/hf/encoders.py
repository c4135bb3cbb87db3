"""Hugging Face's names of parameters and settings of BERT, DistilBERT, ModernBERT, and ModernBERT decoders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megahead.config.model import ModelConfig
from megahead.errors import FieldError
from megahead.hf.families import COMMON_SETTINGS, GELU_NAMES, Family, ParameterNames, SettingNames

_TENSORFLOW_KEYS = ((".gamma", ".weight"), (".beta", ".bias"))  # names of a norm's parameters in TensorFlow
_DISTILBERT_EPS = 1e-12  # config.json of a DistilBERT has no key for it

_BERT = SettingNames(
    COMMON_SETTINGS
    | {
        "token_types": "type_vocab_size",
        "norm_eps": "layer_norm_eps",
        "hidden_dropout": "hidden_dropout_prob",
        "attention_dropout": "attention_probs_dropout_prob",
    },
    required=("num_layers", "hidden_size", "num_heads", "vocab_size"),
    defaults={"family": "bert"},
    fixed={"position_embedding_type": "absolute"},
)
_DISTILBERT = SettingNames(
    {
        "num_layers": "n_layers",
        "hidden_size": "dim",
        "num_heads": "n_heads",
        "intermediate_size": "hidden_dim",
        "vocab_size": "vocab_size",
        "max_positions": "max_position_embeddings",
        "hidden_dropout": "dropout",
        "attention_dropout": "attention_dropout",
        "init_std": "initializer_range",
    },
    activation="activation",
    required=_BERT.required,
    defaults={"family": "bert", "token_types": 0, "norm_eps": _DISTILBERT_EPS},
)


def distilbert_config(model: ModelConfig) -> dict[str, Any]:
    """Returns the content of `config.json` for the shape of a DistilBERT."""
    if model.norm_eps != _DISTILBERT_EPS:
        raise FieldError("model.norm_eps", f"be {_DISTILBERT_EPS} in a DistilBERT (token_types 0)", got=model.norm_eps)
    return {"model_type": "distilbert", **_DISTILBERT.hf_config(model), "sinusoidal_pos_embds": False}


def bert_settings(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a ModelConfig; FieldError for what our BERT does not support."""
    if hf_config.get("is_decoder"):
        raise FieldError("config.json: is_decoder", "be false, as our BERT reads in both directions", got=True)
    return _BERT.model_settings(hf_config)


BERT = Family(
    title="BERT",
    class_prefix="Bert",
    head_type="MaskedLM",
    base_model_prefix="bert.",
    names=ParameterNames(
        {
            "backbone.embedding": "bert.embeddings.word_embeddings",
            "backbone.positions": "bert.embeddings.position_embeddings",
            "backbone.token_types": "bert.embeddings.token_type_embeddings",
            "backbone.embedding_norm": "bert.embeddings.LayerNorm",
            "backbone.blocks.*.attention.query": "bert.encoder.layer.*.attention.self.query",
            "backbone.blocks.*.attention.key": "bert.encoder.layer.*.attention.self.key",
            "backbone.blocks.*.attention.value": "bert.encoder.layer.*.attention.self.value",
            "backbone.blocks.*.attention.output": "bert.encoder.layer.*.attention.output.dense",
            "backbone.blocks.*.attention_norm": "bert.encoder.layer.*.attention.output.LayerNorm",
            "backbone.blocks.*.mlp.up": "bert.encoder.layer.*.intermediate.dense",
            "backbone.blocks.*.mlp.down": "bert.encoder.layer.*.output.dense",
            "backbone.blocks.*.mlp_norm": "bert.encoder.layer.*.output.LayerNorm",
            "mask_head.dense": "cls.predictions.transform.dense",
            "mask_head.norm": "cls.predictions.transform.LayerNorm",
            "mask_head.bias": "cls.predictions.bias",
            "head.weight": "cls.predictions.decoder.weight",
        }
    ),
    ignored_keys=("pooler.", "cls.seq_relationship.", "position_ids", "cls.predictions.decoder.bias"),
    head_prefixes=("cls.",),
    model_settings=bert_settings,
    hf_config=lambda model: {"model_type": "bert", **_BERT.hf_config(model)},
    legacy_keys=_TENSORFLOW_KEYS,
    untied_bias_name="cls.predictions.decoder.bias",
)

DISTILBERT = Family(
    title="DistilBERT",
    class_prefix="DistilBert",
    head_type="MaskedLM",
    base_model_prefix="distilbert.",
    names=ParameterNames(
        {
            "backbone.embedding": "distilbert.embeddings.word_embeddings",
            "backbone.positions": "distilbert.embeddings.position_embeddings",
            "backbone.embedding_norm": "distilbert.embeddings.LayerNorm",
            "backbone.blocks.*.attention.query": "distilbert.transformer.layer.*.attention.q_lin",
            "backbone.blocks.*.attention.key": "distilbert.transformer.layer.*.attention.k_lin",
            "backbone.blocks.*.attention.value": "distilbert.transformer.layer.*.attention.v_lin",
            "backbone.blocks.*.attention.output": "distilbert.transformer.layer.*.attention.out_lin",
            "backbone.blocks.*.attention_norm": "distilbert.transformer.layer.*.sa_layer_norm",
            "backbone.blocks.*.mlp.up": "distilbert.transformer.layer.*.ffn.lin1",
            "backbone.blocks.*.mlp.down": "distilbert.transformer.layer.*.ffn.lin2",
            "backbone.blocks.*.mlp_norm": "distilbert.transformer.layer.*.output_layer_norm",
            "mask_head.dense": "vocab_transform",
            "mask_head.norm": "vocab_layer_norm",
            "mask_head.bias": "vocab_projector.bias",
            "head.weight": "vocab_projector.weight",
        }
    ),
    ignored_keys=("position_ids",),
    head_prefixes=("vocab_",),
    model_settings=_DISTILBERT.model_settings,
    hf_config=distilbert_config,
    legacy_keys=_TENSORFLOW_KEYS,
)


# ModernBERT.

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
    fixed={"norm_bias": False, "attention_bias": False, "mlp_bias": False, "decoder_bias": True},
)
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"
_ROPE_BASES = {
    _GLOBAL: ("rotary_base", "global_rope_theta", 160_000.0),
    _LOCAL: ("local_rotary_base", "local_rope_theta", 1e4),
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
        "layer_types": _layer_types(model.num_layers, model.global_every),
        "rope_parameters": {name: {"rope_type": "default", "rope_theta": base} for name, base in bases.items()},
        "global_attn_every_n_layers": model.global_every,
        **{legacy_key: bases[layer_type] for layer_type, (_, legacy_key, _) in _ROPE_BASES.items()},
    }


def modernbert_settings(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a ModelConfig; FieldError for what our ModernBERT does not support."""
    settings = _MODERNBERT.model_settings(hf_config)
    transform = hf_config.get("classifier_activation", "gelu")
    if GELU_NAMES.get(transform) != settings["activation"]:
        rule = f"be {hf_config.get('hidden_activation', 'gelu')}, as hidden_activation"
        raise FieldError("config.json: classifier_activation", rule, got=transform)
    dropout, mlp_dropout = hf_config.get("embedding_dropout", 0.0), hf_config.get("mlp_dropout", 0.0)
    if dropout != mlp_dropout:
        raise FieldError("config.json: mlp_dropout", f"be {dropout:g}, as embedding_dropout", got=mlp_dropout)
    return {
        **settings,
        "global_every": _global_interval(hf_config),
        **{name: _rope_base(hf_config, layer_type) for layer_type, (name, _, _) in _ROPE_BASES.items()},
    }


def _global_interval(hf_config: Mapping[str, Any]) -> int:
    """Returns the distance from one layer with global attention to the next."""
    num_layers, layer_types = hf_config["num_hidden_layers"], hf_config.get("layer_types")
    interval = hf_config.get("global_attn_every_n_layers", 3)
    if layer_types is None:
        return int(interval)
    global_layers = [layer for layer, layer_type in enumerate(layer_types) if layer and layer_type == _GLOBAL]
    interval = global_layers[0] if global_layers else max(interval, num_layers)
    if list(layer_types) != _layer_types(num_layers, interval):
        rule = f"be {_GLOBAL} at equal distances, from the first layer on"
        raise FieldError("config.json: layer_types", rule, got="another list")
    return int(interval)


def _layer_types(num_layers: int, interval: int) -> list[str]:
    return [_LOCAL if layer % interval else _GLOBAL for layer in range(num_layers)]


def _rope_base(hf_config: Mapping[str, Any], layer_type: str) -> float:
    """Returns the rotary base of a layer type; FieldError for scaled frequencies."""
    _, legacy_key, default = _ROPE_BASES[layer_type]
    rope = {**((hf_config.get("rope_parameters") or {}).get(layer_type) or {}), **(hf_config.get("rope_scaling") or {})}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default":
        raise FieldError(f"config.json: rope_parameters.{layer_type}.rope_type", "be default", got=rope_type)
    return float(rope.get("rope_theta", hf_config.get(legacy_key, default)))


MODERNBERT = Family(
    title="ModernBERT",
    class_prefix="ModernBert",
    head_type="MaskedLM",
    base_model_prefix="model.",
    names=ParameterNames(
        _MODERNBERT_NAMES
        | {
            (
                "backbone.blocks.*.attention.query",
                "backbone.blocks.*.attention.key",
                "backbone.blocks.*.attention.value",
            ): "model.layers.*.attn.Wqkv",
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
"""Hugging Face's window is twice the number of visible tokens with the token itself, ours twice that without."""


def modernbert_decoder_config(model: ModelConfig) -> dict[str, Any]:
    """Returns the content of `config.json` for the shape of `model`."""
    window = {"local_attention": model.local_window + _WINDOW_OFFSET}
    return modernbert_config(model) | {"model_type": "modernbert-decoder"} | window


def modernbert_decoder_settings(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a ModelConfig; FieldError for what our ModernBERT does not support."""
    window = hf_config.get("local_attention", 128)
    if not isinstance(window, int) or window < 4 or window % 2:
        raise FieldError("config.json: local_attention", "be an even number of at least 4", got=window)
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

FAMILIES = {"bert": BERT, "distilbert": DISTILBERT, "modernbert": MODERNBERT, "modernbert-decoder": MODERNBERT_DECODER}
"""By `model_type`; one of them is causal."""


def encoder_family(model: ModelConfig) -> Family:
    """Returns the family that `model` is exported as: a BERT without token types is a DistilBERT, a causal ModernBERT a
    ModernBERT decoder. FieldError for a causal BERT."""
    if model.family == "modernbert":
        return MODERNBERT_DECODER if model.is_causal else MODERNBERT
    if model.is_causal:
        rule, hint = "be false in a bert that is exported", "a modernbert is exported either way"
        raise FieldError("model.is_causal", rule, got="true", hint=hint)
    return BERT if model.token_types else DISTILBERT
