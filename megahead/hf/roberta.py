"""Hugging Face's names of parameters and settings of RoBERTa and XLM-R, which differ in their classes' names alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from megahead.config.model import ModelConfig
from megahead.errors import FieldError
from megahead.hf.bert import BERT, bert_names
from megahead.hf.families import COMMON_SETTINGS, Family, ParameterNames, SettingNames

_PADDING_TOKEN = 1  # where config.json names none

_ROBERTA = SettingNames(
    COMMON_SETTINGS
    | {
        "norm_eps": "layer_norm_eps",
        "hidden_dropout": "hidden_dropout_prob",
        "attention_dropout": "attention_probs_dropout_prob",
    },
    activations={"gelu": "gelu"},  # also the head's, whatever config.json says
    required=("num_layers", "hidden_size", "num_heads", "vocab_size", "max_positions"),
    fixed={"position_embedding_type": "absolute", "type_vocab_size": 1, "is_decoder": False},
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
    """Returns the row of the position embedding that a first token has: the padding id + 1."""
    padding = hf_config.get("pad_token_id", _PADDING_TOKEN)
    if not isinstance(padding, int) or padding < 0:
        raise FieldError("config.json: pad_token_id", "be an id, after which positions begin", got=padding)
    return padding + 1


ROBERTA = Family(
    title="RoBERTa",
    class_prefix="Roberta",
    head_type="MaskedLM",
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
    legacy_keys=BERT.legacy_keys,
    untied_bias_name="lm_head.decoder.bias",
)

XLM_ROBERTA = replace(
    ROBERTA,
    title="XLM-R",
    class_prefix="XLMRoberta",
    model_settings=partial(roberta_settings, family="xlm_roberta"),
    hf_config=partial(roberta_config, model_type="xlm-roberta"),
)
