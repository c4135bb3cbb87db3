"""What Hugging Face calls the parts and settings of ModernBERT, and of its causal form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megahead.config.model import ModelConfig
from megahead.errors import FieldError
from megahead.hf.names import EncoderNames, Renames

# What Hugging Face calls the parts and settings of ModernBERT.

MODERNBERT = EncoderNames(
    kind="ModernBERT",
    prefix="model.",
    table=Renames(
        {
            "backbone.embedding": "model.embeddings.tok_embeddings",
            "backbone.embedding_norm": "model.embeddings.norm",
            "backbone.blocks.*.attention_norm": "model.layers.*.attn_norm",
            (
                "backbone.blocks.*.attention.query",
                "backbone.blocks.*.attention.key",
                "backbone.blocks.*.attention.value",
            ): "model.layers.*.attn.Wqkv",
            "backbone.blocks.*.attention.output": "model.layers.*.attn.Wo",
            "backbone.blocks.*.mlp_norm": "model.layers.*.mlp_norm",
            ("backbone.blocks.*.mlp.gate", "backbone.blocks.*.mlp.up"): "model.layers.*.mlp.Wi",
            "backbone.blocks.*.mlp.down": "model.layers.*.mlp.Wo",
            "backbone.final_norm": "model.final_norm",
            "mask_head.dense": "head.dense",
            "mask_head.norm": "head.norm",
            "mask_head.bias": "decoder.bias",
            "head.weight": "decoder.weight",
        }
    ),
    ignored=("rotary_emb.", "inv_freq"),
    heads=("head.", "decoder."),
)

_SETTINGS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings",
    "norm_eps": "norm_eps",
    "hidden_dropout": "embedding_dropout",
    "attention_dropout": "attention_dropout",
    "init_std": "initializer_range",
    "local_window": "local_attention",
    "transform_bias": "classifier_bias",
}
"""Settings of ours and theirs that mean the same."""

_ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
_HF_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
_NO_BIASES = {"norm_bias": False, "attention_bias": False, "mlp_bias": False}
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"
_BASES = {
    _GLOBAL: ("rotary_base", "global_rope_theta", 160_000.0),
    _LOCAL: ("local_rotary_base", "local_rope_theta", 1e4),
}
"""For a kind of layer: our base, where older writers told it, and what it is where nobody tells."""


def modernbert_config(model: ModelConfig) -> dict[str, Any]:
    """What `config.json` says of the shape of `model`.

    Kinds of layers and their rotary bases appear twice: `layer_types` and `rope_parameters` for transformers 5, the
    other three for older readers.
    """
    settings = {theirs: getattr(model, ours) for ours, theirs in _SETTINGS.items()}
    settings |= {"intermediate_size": model.mlp_size(), "mlp_dropout": model.hidden_dropout}
    activation = _HF_ACTIVATIONS[model.activation]
    bases = {kind: getattr(model, ours) for kind, (ours, _, _) in _BASES.items()}
    return {
        "model_type": "modernbert",
        **settings,
        **_NO_BIASES,
        "decoder_bias": True,
        "hidden_activation": activation,
        "classifier_activation": activation,
        "layer_types": _layer_types(model.num_layers, model.global_every),
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()},
        "global_attn_every_n_layers": model.global_every,
        **{old: bases[kind] for kind, (_, old, _) in _BASES.items()},
    }


def modernbert_settings(content: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a ModelConfig that `config.json` asks for; FieldError for what our ModernBERT has not."""
    _check(content)
    known = {ours: content[theirs] for ours, theirs in _SETTINGS.items() if content.get(theirs) is not None}
    return {
        "family": "modernbert",
        **known,
        "activation": _ACTIVATIONS[content.get("hidden_activation", "gelu")],
        "global_every": _global_every(content),
        **{_BASES[kind][0]: _base(content, kind) for kind in _BASES},
    }


def _check(content: Mapping[str, Any]) -> None:
    for key in ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"):
        if key not in content:
            raise FieldError(f"config.json: {key}", "be given", got="missing")
    for key, needed in (_NO_BIASES | {"decoder_bias": True}).items():
        if content.get(key, needed) != needed:
            raise FieldError(f"config.json: {key}", f"be {str(needed).lower()}", got=str(not needed).lower())
    activation = content.get("hidden_activation", "gelu")
    if activation not in _ACTIVATIONS:
        raise FieldError("config.json: hidden_activation", f"be one of {', '.join(_ACTIVATIONS)}", got=activation)
    transform = content.get("classifier_activation", "gelu")
    if _ACTIVATIONS.get(transform) != _ACTIVATIONS[activation]:
        raise FieldError("config.json: classifier_activation", f"be {activation}, as hidden_activation", got=transform)
    dropout, its_own = content.get("embedding_dropout", 0.0), content.get("mlp_dropout", 0.0)
    if dropout != its_own:
        raise FieldError("config.json: mlp_dropout", f"be {dropout:g}, as embedding_dropout", got=its_own)
    if content.get("quantization_config") is not None:
        raise FieldError("config.json: quantization_config", "be missing (weights as they are)", got="given")


def _global_every(content: Mapping[str, Any]) -> int:
    """How many layers there are from one global one to the next."""
    layers, told = content["num_hidden_layers"], content.get("layer_types")
    every = content.get("global_attn_every_n_layers", 3)
    if told is None:
        return int(every)
    later = [layer for layer, kind in enumerate(told) if layer and kind == _GLOBAL]
    every = later[0] if later else max(every, layers)
    if list(told) != _layer_types(layers, every):
        raise FieldError(
            "config.json: layer_types", f"be {_GLOBAL} each so many layers, from the first on", got="otherwise"
        )
    return int(every)


def _layer_types(layers: int, every: int) -> list[str]:
    return [_LOCAL if layer % every else _GLOBAL for layer in range(layers)]


def _base(content: Mapping[str, Any], kind: str) -> float:
    """The rotary base of a kind of layers; unscaled frequencies are all we have."""
    _, old, default = _BASES[kind]
    told = {**((content.get("rope_parameters") or {}).get(kind) or {}), **(content.get("rope_scaling") or {})}
    scaling = told.get("rope_type", told.get("type", "default"))
    if scaling != "default":
        raise FieldError(f"config.json: rope_parameters.{kind}.rope_type", "be default", got=scaling)
    return float(told.get("rope_theta", content.get(old, default)))


# What Hugging Face calls the parts and settings of a ModernBERT that is causal, and where it differs from one that is
# not (Weller et al. 2025, arXiv 2507.11412).

MODERNBERT_DECODER = EncoderNames(
    kind="ModernBERT decoder",
    prefix="model.",
    table=Renames(
        {
            "backbone.embedding": "model.embeddings.tok_embeddings",
            "backbone.embedding_norm": "model.embeddings.norm",
            "backbone.blocks.*.attention_norm": "model.layers.*.attn_norm",
            "backbone.blocks.*.attention.query": "model.layers.*.attn.q_proj",
            "backbone.blocks.*.attention.key": "model.layers.*.attn.k_proj",
            "backbone.blocks.*.attention.value": "model.layers.*.attn.v_proj",
            "backbone.blocks.*.attention.output": "model.layers.*.attn.Wo",
            "backbone.blocks.*.mlp_norm": "model.layers.*.mlp_norm",
            ("backbone.blocks.*.mlp.gate", "backbone.blocks.*.mlp.up"): "model.layers.*.mlp.Wi",
            "backbone.blocks.*.mlp.down": "model.layers.*.mlp.Wo",
            "backbone.final_norm": "model.final_norm",
            "mask_head.dense": "lm_head.dense",
            "mask_head.norm": "lm_head.norm",
            "mask_head.bias": "decoder.bias",
            "head.weight": "decoder.weight",
        }
    ),
    ignored=("rotary_emb.", "inv_freq"),
    heads=("lm_head.", "decoder."),
)

_ITSELF = 2
"""Their window is twice the number of tokens that one sees with itself, ours twice that of those before it."""


def modernbert_decoder_config(model: ModelConfig) -> dict[str, Any]:
    """What `config.json` says of the shape of `model`."""
    window = {"local_attention": model.local_window + _ITSELF}
    return modernbert_config(model) | {"model_type": "modernbert-decoder"} | window


def modernbert_decoder_settings(content: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a ModelConfig that `config.json` asks for; FieldError for what our ModernBERT has not."""
    window = content.get("local_attention", 128)
    if not isinstance(window, int) or window < 4 or window % 2:
        raise FieldError("config.json: local_attention", "be an even number of at least 4", got=window)
    known = modernbert_settings({**content, "local_attention": window - _ITSELF})
    return {**known, "is_causal": True}
