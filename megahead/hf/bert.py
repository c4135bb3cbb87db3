"""What Hugging Face calls the parts and settings of BERT, and of DistilBERT, which is it without types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megahead.config.model import ModelConfig
from megahead.errors import FieldError
from megahead.hf.names import EncoderNames, Renames

_EPS = 1e-12  # DistilBERT's, for which its settings have no key


BERT = EncoderNames(
    kind="bert",
    prefix="bert.",
    table=Renames(
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
    ignored=("pooler.", "cls.seq_relationship.", "position_ids", "cls.predictions.decoder.bias"),
    heads=("cls.",),
)

DISTILBERT = EncoderNames(
    kind="distilbert",
    prefix="distilbert.",
    table=Renames(
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
    ignored=("position_ids",),
    heads=("vocab_",),
)

_ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh"}
_HF_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}

_BERT_SETTINGS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings",
    "token_types": "type_vocab_size",
    "norm_eps": "layer_norm_eps",
    "hidden_dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "init_std": "initializer_range",
}
_DISTILBERT_SETTINGS = {
    "num_layers": "n_layers",
    "hidden_size": "dim",
    "num_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings",
    "hidden_dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "init_std": "initializer_range",
}
"""Settings of ours and theirs that mean the same."""


def bert_config(model: ModelConfig) -> dict[str, Any]:
    """What `config.json` says of the shape of a BERT."""
    settings = {theirs: _value(model, ours) for ours, theirs in _BERT_SETTINGS.items()}
    activation = {"hidden_act": _HF_ACTIVATIONS[model.activation], "position_embedding_type": "absolute"}
    return {"model_type": "bert", **settings, **activation}


def distilbert_config(model: ModelConfig) -> dict[str, Any]:
    """The same of a DistilBERT."""
    if model.norm_eps != _EPS:
        raise FieldError("model.norm_eps", f"be {_EPS} in a DistilBERT (token_types 0)", got=model.norm_eps)
    settings = {theirs: _value(model, ours) for ours, theirs in _DISTILBERT_SETTINGS.items()}
    activation = {"activation": _HF_ACTIVATIONS[model.activation], "sinusoidal_pos_embds": False}
    return {"model_type": "distilbert", **settings, **activation}


def bert_settings(content: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a ModelConfig that a BERT's `config.json` asks for; FieldError for what our BERT has not."""
    kind = content.get("position_embedding_type", "absolute")
    if kind != "absolute":
        raise FieldError("config.json: position_embedding_type", "be absolute", got=kind)
    if content.get("is_decoder"):
        raise FieldError("config.json: is_decoder", "be false, as our BERT reads in both directions", got=True)
    return _settings(content, _BERT_SETTINGS, "hidden_act")


def distilbert_settings(content: Mapping[str, Any]) -> dict[str, Any]:
    """The same for DistilBERT."""
    return _settings(content, _DISTILBERT_SETTINGS, "activation") | {"token_types": 0, "norm_eps": _EPS}


def _value(model: ModelConfig, field: str) -> Any:
    return model.mlp_size() if field == "intermediate_size" else getattr(model, field)


def _settings(content: Mapping[str, Any], names: Mapping[str, str], activation_key: str) -> dict[str, Any]:
    for key in ("num_layers", "hidden_size", "num_heads", "vocab_size"):
        if names[key] not in content:
            raise FieldError(f"config.json: {names[key]}", "be given", got="missing")
    activation = content.get(activation_key, "gelu")
    if activation not in _ACTIVATIONS:
        raise FieldError(f"config.json: {activation_key}", f"be one of {', '.join(_ACTIVATIONS)}", got=activation)
    known = {ours: content[theirs] for ours, theirs in names.items() if theirs in content}
    return {"family": "bert", **known, "activation": _ACTIVATIONS[activation]}
