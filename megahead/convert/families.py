"""The kinds of models that go out and come in: one entry each, so that exporting and importing know no names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megahead.config import ModelConfig
from megahead.convert import bert, gpt_neox
from megahead.errors import FieldError


@dataclass(frozen=True)
class Family:
    """What Hugging Face calls a kind of model, its parts and its settings."""

    title: str
    """For people."""

    prefix: str
    """Begins the backbone's names in a model with a head."""

    backbone: str
    """Class of the backbone alone."""

    with_head: str
    """Class of a model with a head."""

    auto_with_head: str
    """The Auto class that loads it."""

    our_name: Callable[[str], str | None]
    """Our name of a stored tensor; None for what is no parameter of ours, FieldError for a stranger."""

    their_name: Callable[[str], str | None]
    """Name of our parameter in a model with a head; None where there is none."""

    settings: Callable[[Mapping[str, Any]], dict[str, Any]]
    """Makes the settings of a ModelConfig from config.json."""

    untied_bias: str | None = None
    """A second name of an encoder's output bias, wanted beside an output matrix of its own."""


_FAMILIES = {
    "gpt_neox": Family(
        "GPT-NeoX",
        gpt_neox.BACKBONE_PREFIX,
        "GPTNeoXModel",
        "GPTNeoXForCausalLM",
        "AutoModelForCausalLM",
        gpt_neox.our_name,
        gpt_neox.RENAMES.theirs,
        gpt_neox.model_settings,
    ),
    "bert": Family(
        "BERT",
        bert.BERT.prefix,
        "BertModel",
        "BertForMaskedLM",
        "AutoModelForMaskedLM",
        bert.BERT.ours,
        bert.BERT.table.theirs,
        bert.bert_settings,
        untied_bias="cls.predictions.decoder.bias",
    ),
    "distilbert": Family(
        "DistilBERT",
        bert.DISTILBERT.prefix,
        "DistilBertModel",
        "DistilBertForMaskedLM",
        "AutoModelForMaskedLM",
        bert.DISTILBERT.ours,
        bert.DISTILBERT.table.theirs,
        bert.distilbert_settings,
    ),
}


def family_of(model: ModelConfig) -> Family:
    """The kind that `model` is exported as: a BERT without token types is a DistilBERT."""
    return _FAMILIES["distilbert" if model.is_encoder() and not model.token_types else model.family]


def family_named(content: Mapping[str, Any]) -> Family:
    """The kind of a folder, by its config.json; FieldError for one we do not have."""
    kind = content.get("model_type")
    if kind not in _FAMILIES:
        raise FieldError("config.json: model_type", f"be one of {', '.join(_FAMILIES)}", got=kind)
    return _FAMILIES[kind]


def hf_config(model: ModelConfig, *, vocab_size: int, end_token: int, architecture: str, tied: bool) -> dict[str, Any]:
    """The content of `config.json` for a model whose table has `vocab_size` rows."""
    if not model.is_encoder():
        return gpt_neox.hf_config(
            model, vocab_size=vocab_size, end_token=end_token, architecture=architecture, tied=tied
        )
    make = bert.bert_config if model.token_types else bert.distilbert_config
    return make(model, vocab_size=vocab_size, architecture=architecture, tied=tied)
