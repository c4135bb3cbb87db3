"""What Hugging Face calls the parts and settings of BERT, DistilBERT, ModernBERT, and of a causal ModernBERT."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megahead.config.model import ModelConfig
from megahead.errors import FieldError
from megahead.hf.families import GELU, USUAL, Family, Renames, SettingNames

_TENSORFLOW = ((".gamma", ".weight"), (".beta", ".bias"))  # as it called the parts of a norm
_EPS = 1e-12  # of DistilBERT, whose settings have no key for it

_BERT = SettingNames(
    USUAL
    | {
        "token_types": "type_vocab_size",
        "norm_eps": "layer_norm_eps",
        "hidden_dropout": "hidden_dropout_prob",
        "attention_dropout": "attention_probs_dropout_prob",
    },
    needed=("num_layers", "hidden_size", "num_heads", "vocab_size"),
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
    needed=_BERT.needed,
    defaults={"family": "bert", "token_types": 0, "norm_eps": _EPS},
)


def distilbert_config(model: ModelConfig) -> dict[str, Any]:
    """The content of `config.json` for the shape of a DistilBERT."""
    if model.norm_eps != _EPS:
        raise FieldError("model.norm_eps", f"be {_EPS} in a DistilBERT (token_types 0)", got=model.norm_eps)
    return {"model_type": "distilbert", **_DISTILBERT.config(model), "sinusoidal_pos_embds": False}


def bert_settings(content: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a ModelConfig that a BERT's `config.json` gives; FieldError for what our BERT has not."""
    if content.get("is_decoder"):
        raise FieldError("config.json: is_decoder", "be false, as our BERT reads in both directions", got=True)
    return _BERT.settings(content)


BERT = Family(
    title="BERT",
    classes="Bert",
    predicts="MaskedLM",
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
    settings=bert_settings,
    config=lambda model: {"model_type": "bert", **_BERT.config(model)},
    older=_TENSORFLOW,
    untied_bias="cls.predictions.decoder.bias",
)

DISTILBERT = Family(
    title="DistilBERT",
    classes="DistilBert",
    predicts="MaskedLM",
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
    settings=_DISTILBERT.settings,
    config=distilbert_config,
    older=_TENSORFLOW,
)


# ModernBERT.

_MODERNBERT_BODY: dict[str | tuple[str, ...], str] = {
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
    USUAL
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
_BASES = {
    _GLOBAL: ("rotary_base", "global_rope_theta", 160_000.0),
    _LOCAL: ("local_rotary_base", "local_rope_theta", 1e4),
}
"""For a kind of layer: our base, where older writers put it, and its default."""


def modernbert_config(model: ModelConfig) -> dict[str, Any]:
    """The content of `config.json` for the shape of `model`.

    Kinds of layers and their rotary bases appear twice: `layer_types` and `rope_parameters` for transformers 5, the
    other three for older readers.
    """
    settings = _MODERNBERT.config(model)
    bases = {kind: getattr(model, ours) for kind, (ours, _, _) in _BASES.items()}
    return {
        "model_type": "modernbert",
        **settings,
        "mlp_dropout": model.hidden_dropout,
        "classifier_activation": settings["hidden_activation"],
        "layer_types": _layer_types(model.num_layers, model.global_every),
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()},
        "global_attn_every_n_layers": model.global_every,
        **{old: bases[kind] for kind, (_, old, _) in _BASES.items()},
    }


def modernbert_settings(content: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a ModelConfig that `config.json` gives; FieldError for what our ModernBERT has not."""
    known = _MODERNBERT.settings(content)
    transform = content.get("classifier_activation", "gelu")
    if GELU.get(transform) != known["activation"]:
        rule = f"be {content.get('hidden_activation', 'gelu')}, as hidden_activation"
        raise FieldError("config.json: classifier_activation", rule, got=transform)
    dropout, its_own = content.get("embedding_dropout", 0.0), content.get("mlp_dropout", 0.0)
    if dropout != its_own:
        raise FieldError("config.json: mlp_dropout", f"be {dropout:g}, as embedding_dropout", got=its_own)
    return {
        **known,
        "global_every": _global_every(content),
        **{_BASES[kind][0]: _base(content, kind) for kind in _BASES},
    }


def _global_every(content: Mapping[str, Any]) -> int:
    """How many layers there are from one global layer to the next."""
    layers, kinds = content["num_hidden_layers"], content.get("layer_types")
    every = content.get("global_attn_every_n_layers", 3)
    if kinds is None:
        return int(every)
    later = [layer for layer, kind in enumerate(kinds) if layer and kind == _GLOBAL]
    every = later[0] if later else max(every, layers)
    if list(kinds) != _layer_types(layers, every):
        raise FieldError(
            "config.json: layer_types", f"be {_GLOBAL} each so many layers, from the first on", got="otherwise"
        )
    return int(every)


def _layer_types(layers: int, every: int) -> list[str]:
    return [_LOCAL if layer % every else _GLOBAL for layer in range(layers)]


def _base(content: Mapping[str, Any], kind: str) -> float:
    """The rotary base of a kind of layers; unscaled frequencies are all we have."""
    _, old, default = _BASES[kind]
    given = {**((content.get("rope_parameters") or {}).get(kind) or {}), **(content.get("rope_scaling") or {})}
    scaling = given.get("rope_type", given.get("type", "default"))
    if scaling != "default":
        raise FieldError(f"config.json: rope_parameters.{kind}.rope_type", "be default", got=scaling)
    return float(given.get("rope_theta", content.get(old, default)))


MODERNBERT = Family(
    title="ModernBERT",
    classes="ModernBert",
    predicts="MaskedLM",
    prefix="model.",
    table=Renames(
        _MODERNBERT_BODY
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
    ignored=("rotary_emb.", "inv_freq"),
    heads=("head.", "decoder."),
    settings=modernbert_settings,
    config=modernbert_config,
)


# A ModernBERT that is causal, and where it differs from one that is not (Weller et al. 2025, arXiv 2507.11412).

_ITSELF = 2
"""Their window is twice the number of tokens that one sees with itself, ours twice that of those before it."""


def modernbert_decoder_config(model: ModelConfig) -> dict[str, Any]:
    """The content of `config.json` for the shape of `model`."""
    window = {"local_attention": model.local_window + _ITSELF}
    return modernbert_config(model) | {"model_type": "modernbert-decoder"} | window


def modernbert_decoder_settings(content: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a ModelConfig that `config.json` gives; FieldError for what our ModernBERT has not."""
    window = content.get("local_attention", 128)
    if not isinstance(window, int) or window < 4 or window % 2:
        raise FieldError("config.json: local_attention", "be an even number of at least 4", got=window)
    known = modernbert_settings({**content, "local_attention": window - _ITSELF})
    return {**known, "is_causal": True}


MODERNBERT_DECODER = replace(
    MODERNBERT,
    title="ModernBERT decoder",
    classes="ModernBertDecoder",
    predicts="CausalLM",
    table=Renames(
        _MODERNBERT_BODY
        | {
            "backbone.blocks.*.attention.query": "model.layers.*.attn.q_proj",
            "backbone.blocks.*.attention.key": "model.layers.*.attn.k_proj",
            "backbone.blocks.*.attention.value": "model.layers.*.attn.v_proj",
            "mask_head.dense": "lm_head.dense",
            "mask_head.norm": "lm_head.norm",
        }
    ),
    heads=("lm_head.", "decoder."),
    settings=modernbert_decoder_settings,
    config=modernbert_decoder_config,
)

FAMILIES = {"bert": BERT, "distilbert": DISTILBERT, "modernbert": MODERNBERT, "modernbert-decoder": MODERNBERT_DECODER}
"""By `model_type`; one of them is causal."""


def encoder_of(model: ModelConfig) -> Family:
    """The kind that `model` is exported as: a BERT without token types is a DistilBERT, a causal ModernBERT the decoder
    of that name. FieldError for a causal BERT."""
    if model.family == "modernbert":
        return MODERNBERT_DECODER if model.is_causal else MODERNBERT
    if model.is_causal:
        rule, hint = "be false in a bert that is exported", "a modernbert is exported either way"
        raise FieldError("model.is_causal", rule, got="true", hint=hint)
    return BERT if model.token_types else DISTILBERT
