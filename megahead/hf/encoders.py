"""Hugging Face's names of parameters and settings of BERT, DistilBERT, RoBERTa, XLM-R and ModernBERT (also mmBERT)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from megahead.config.model import DISTILBERT_EPS, ModelConfig
from megahead.errors import FieldError
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
    rope_type_of,
)

_TENSORFLOW_KEYS = ((".gamma", ".weight"), (".beta", ".bias"))  # names of a norm's parameters in TensorFlow

_NORM_AND_DROPOUT = {
    "norm_eps": "layer_norm_eps",
    "hidden_dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
}
_BERT = SettingNames(
    COMMON_SETTINGS | {"token_types": "type_vocab_size"} | _NORM_AND_DROPOUT,
    required=("num_layers", "hidden_size", "num_heads", "vocab_size"),
    defaults={"family": "bert"},
    required_values={"position_embedding_type": "absolute"},
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
    defaults={"family": "bert", "token_types": 0, "norm_eps": DISTILBERT_EPS},
)


def distilbert_config(model: ModelConfig) -> dict[str, Any]:
    """Returns the content of `config.json` for the shape of a DistilBERT."""
    if model.norm_eps != DISTILBERT_EPS:
        raise FieldError("model.norm_eps", f"be {DISTILBERT_EPS} in a DistilBERT (token_types 0)", got=model.norm_eps)
    return {"model_type": "distilbert", **_DISTILBERT.hf_config(model), "sinusoidal_pos_embds": False}


def bert_settings(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a ModelConfig; FieldError for what our BERT does not support."""
    rule = "be false, as our BERT reads in both directions"
    require_key(not hf_config.get("is_decoder"), "is_decoder", rule, got=True)
    return _BERT.model_settings(hf_config)


def bert_names(prefix: str) -> dict[str | tuple[str, ...], str]:
    """The parameters of a backbone whose names begin with `prefix`."""
    return {
        "backbone.embedding": f"{prefix}.embeddings.word_embeddings",
        "backbone.positions": f"{prefix}.embeddings.position_embeddings",
        "backbone.token_types": f"{prefix}.embeddings.token_type_embeddings",
        "backbone.embedding_norm": f"{prefix}.embeddings.LayerNorm",
        "backbone.blocks.*.attention.query": f"{prefix}.encoder.layer.*.attention.self.query",
        "backbone.blocks.*.attention.key": f"{prefix}.encoder.layer.*.attention.self.key",
        "backbone.blocks.*.attention.value": f"{prefix}.encoder.layer.*.attention.self.value",
        "backbone.blocks.*.attention.output": f"{prefix}.encoder.layer.*.attention.output.dense",
        "backbone.blocks.*.attention_norm": f"{prefix}.encoder.layer.*.attention.output.LayerNorm",
        "backbone.blocks.*.mlp.up": f"{prefix}.encoder.layer.*.intermediate.dense",
        "backbone.blocks.*.mlp.down": f"{prefix}.encoder.layer.*.output.dense",
        "backbone.blocks.*.mlp_norm": f"{prefix}.encoder.layer.*.output.LayerNorm",
    }


BERT = Family(
    title="BERT",
    class_prefix="Bert",
    head_type="MaskedLM",
    base_model_prefix="bert.",
    names=ParameterNames(
        bert_names("bert")
        | {
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


# RoBERTa, and XLM-R, which differs only in its classes' names.

_PADDING_TOKEN = 1  # where config.json names none

_ROBERTA = SettingNames(
    COMMON_SETTINGS | _NORM_AND_DROPOUT,
    activations={"gelu": "gelu"},  # RoBERTa's head always uses gelu, whatever config.json says
    required=("num_layers", "hidden_size", "num_heads", "vocab_size", "max_positions"),
    defaults={"norm_eps": 1e-12},
    required_values={"position_embedding_type": "absolute", "type_vocab_size": 1, "is_decoder": False},
)


def roberta_config(model: ModelConfig, *, model_type: str) -> dict[str, Any]:
    """Returns the content of `config.json` for the shape of `model`."""
    positions = model.max_positions + model.position_offset
    padding = {"pad_token_id": model.padding_token()}
    return {"model_type": model_type, **_ROBERTA.hf_config(model), "max_position_embeddings": positions, **padding}


def roberta_settings(hf_config: Mapping[str, Any], *, family: str) -> dict[str, Any]:
    """Returns the settings of a ModelConfig; FieldError for what our RoBERTa does not support."""
    settings, offset = _ROBERTA.model_settings(hf_config), position_offset(hf_config)
    positions = settings["max_positions"] - offset
    return {**settings, "family": family, "max_positions": positions, "position_offset": offset}


def position_offset(hf_config: Mapping[str, Any]) -> int:
    """Returns the first token's row of the position embedding: the padding id + 1."""
    padding = hf_config.get("pad_token_id", _PADDING_TOKEN)
    is_id = isinstance(padding, int) and padding >= 0
    require_key(is_id, "pad_token_id", "be an id, after which positions begin", got=padding)
    return int(padding) + 1


ROBERTA = replace(
    BERT,
    title="RoBERTa",
    class_prefix="Roberta",
    base_model_prefix="roberta.",
    names=ParameterNames(
        bert_names("roberta")
        | {
            "mask_head.dense": "lm_head.dense",
            "mask_head.norm": "lm_head.layer_norm",
            "mask_head.bias": "lm_head.bias",
            "head.weight": "lm_head.decoder.weight",
        }
    ),
    ignored_keys=("pooler.", "position_ids", "lm_head.decoder.bias"),
    head_prefixes=("lm_head.",),
    model_settings=partial(roberta_settings, family="roberta"),
    hf_config=partial(roberta_config, model_type="roberta"),
    untied_bias_name="lm_head.decoder.bias",
)

XLM_ROBERTA = replace(
    ROBERTA,
    title="XLM-R",
    class_prefix="XLMRoberta",
    model_settings=partial(roberta_settings, family="xlm_roberta"),
    hf_config=partial(roberta_config, model_type="xlm-roberta"),
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
    required_values={"norm_bias": False, "attention_bias": False, "mlp_bias": False, "decoder_bias": True},
)
_ROPE_BASES = {
    GLOBAL: ("rotary_base", "global_rope_theta", 160_000.0),
    LOCAL: ("local_rotary_base", "local_rope_theta", 1e4),
}
"""By layer type: the setting of the base, its legacy key in config.json, and its default."""


def modernbert_config(model: ModelConfig) -> dict[str, Any]:
    """Returns the content of `config.json` for the shape of `model`.

    `layer_types` and `rope_parameters` are for transformers 5, the last three, which say the same, for older versions.
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


def modernbert_settings(hf_config: Mapping[str, Any], *, window_offset: int = 0) -> dict[str, Any]:
    """Returns the settings of a ModelConfig; FieldError for what our ModernBERT does not support.

    window_offset: Hugging Face's `local_attention` minus megahead's `local_window`.
    """
    window = hf_config.get("local_attention", 128)
    require_key(isinstance(window, int), "local_attention", "be a whole number", got=window)
    sliding_window, rule = hf_config.get("sliding_window", window // 2), f"be {window // 2}, half of local_attention"
    require_key(sliding_window == window // 2, "sliding_window", rule, got=sliding_window)
    settings = _MODERNBERT.model_settings({**hf_config, "local_attention": window - window_offset})
    transform = hf_config.get("classifier_activation", "gelu")
    rule = f"be {hf_config.get('hidden_activation', 'gelu')}, as hidden_activation"
    require_key(GELU_NAMES.get(transform) == settings["activation"], "classifier_activation", rule, got=transform)
    dropout, mlp_dropout = hf_config.get("embedding_dropout", 0.0), hf_config.get("mlp_dropout", 0.0)
    require_key(dropout == mlp_dropout, "mlp_dropout", f"be {dropout}, as embedding_dropout", got=mlp_dropout)
    return {
        **settings,
        "global_every": global_interval(hf_config, "global_attn_every_n_layers", default=3, offset=0),
        **{name: _rope_base(hf_config, layer_type) for layer_type, (name, _, _) in _ROPE_BASES.items()},
    }


def _rope_base(hf_config: Mapping[str, Any], layer_type: str) -> float:
    """Returns the rotary base of a layer type; FieldError for scaled frequencies."""
    _, legacy_key, default = _ROPE_BASES[layer_type]
    rope = {**((hf_config.get("rope_parameters") or {}).get(layer_type) or {}), **(hf_config.get("rope_scaling") or {})}
    rope_type = rope_type_of(rope)
    require_key(rope_type == "default", f"rope_parameters.{layer_type}.rope_type", "be default", got=rope_type)
    base = rope.get("rope_theta", hf_config.get(legacy_key, default))
    require_key(isinstance(base, int | float), legacy_key, "be a number", got=base)
    return float(base)


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
    return {**modernbert_settings(hf_config, window_offset=_WINDOW_OFFSET), "is_causal": True}


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

ENCODERS = {
    "bert": BERT,
    "distilbert": DISTILBERT,
    "roberta": ROBERTA,
    "xlm-roberta": XLM_ROBERTA,
    "modernbert": MODERNBERT,
    "modernbert-decoder": MODERNBERT_DECODER,
}
"""The encoders that are imported and exported, by `model_type`; one of them is causal."""

WITH_POSITION_OFFSET = ("roberta", "xlm-roberta")
"""Types whose max_position_embeddings includes the rows before the first token's."""

WITH_POOLER = ("bert", *WITH_POSITION_OFFSET)
"""Types whose backbone has a pooler unless it is built without."""
