"""The kinds of models that are exported and imported: one entry each, which holds all names that differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from megahead.config.model import ModelConfig
from megahead.errors import FieldError
from megahead.hf import decoders, encoders
from megahead.hf.decoders import LLAMA
from megahead.hf.names import TensorNames


@dataclass(frozen=True)
class Family:
    """What Hugging Face calls a kind of model, its parts and its settings."""

    title: str
    """For people."""

    names: TensorNames

    backbone: str
    """Class of the backbone alone."""

    with_head: str
    """Class of a model with a head."""

    auto_with_head: str
    """The Auto class that loads it."""

    settings: Callable[[Mapping[str, Any]], dict[str, Any]]
    """From the content of config.json to the settings of a ModelConfig."""

    config: Callable[[ModelConfig], dict[str, Any]]
    """From a ModelConfig to the content of config.json."""

    untied_bias: str | None = None
    """A second name of an encoder's output bias, wanted beside an output matrix of its own."""

    head_bias: str | None = None
    """Name of a decoder's output bias; None where it has none."""

    as_stored: Callable[[ModelConfig, str, Tensor], Tensor] = lambda _, __, tensor: tensor
    """From a parameter of ours, with its name, to the tensor that theirs stores."""

    zeros: Callable[[ModelConfig], dict[str, int]] = lambda _: {}
    """Vectors that theirs has and ours does without: names and sizes."""


def _llama(kind: str, title: str) -> Family:
    names = f"{title}Model", f"{title}ForCausalLM"
    return Family(title, LLAMA, *names, "AutoModelForCausalLM", decoders.llama_settings(kind), decoders.llama_config)


_FAMILIES = {
    "gpt_neox": Family(
        "GPT-NeoX",
        decoders.GPT_NEOX,
        "GPTNeoXModel",
        "GPTNeoXForCausalLM",
        "AutoModelForCausalLM",
        decoders.gpt_neox_settings,
        decoders.gpt_neox_config,
    ),
    "llama": _llama("llama", "Llama"),
    "mistral": _llama("mistral", "Mistral"),
    "qwen2": _llama("qwen2", "Qwen2"),
    "qwen3": _llama("qwen3", "Qwen3"),
    "bert": Family(
        "BERT",
        encoders.BERT,
        "BertModel",
        "BertForMaskedLM",
        "AutoModelForMaskedLM",
        encoders.bert_settings,
        encoders.bert_config,
        untied_bias="cls.predictions.decoder.bias",
    ),
    "distilbert": Family(
        "DistilBERT",
        encoders.DISTILBERT,
        "DistilBertModel",
        "DistilBertForMaskedLM",
        "AutoModelForMaskedLM",
        encoders.distilbert_settings,
        encoders.distilbert_config,
    ),
    "modernbert": Family(
        "ModernBERT",
        encoders.MODERNBERT,
        "ModernBertModel",
        "ModernBertForMaskedLM",
        "AutoModelForMaskedLM",
        encoders.modernbert_settings,
        encoders.modernbert_config,
    ),
    "modernbert-decoder": Family(
        "ModernBERT decoder",
        encoders.MODERNBERT_DECODER,
        "ModernBertDecoderModel",
        "ModernBertDecoderForCausalLM",
        "AutoModelForCausalLM",
        encoders.modernbert_decoder_settings,
        encoders.modernbert_decoder_config,
    ),
}
_LLAMA_WITH_HEAD_BIAS = replace(
    _FAMILIES["llama"],
    title="Llama (as an ERNIE 4.5 without experts, whose head has a bias)",
    backbone="Ernie4_5_MoeModel",
    with_head="Ernie4_5_MoeForCausalLM",
    config=decoders.ernie_config,
    head_bias=decoders.ERNIE_HEAD_BIAS,
    as_stored=decoders.ernie_as_stored,
    zeros=decoders.ernie_zeros,
)


def family_of(model: ModelConfig, *, head_bias: bool = False) -> Family:
    """The kind that `model` is exported as: a BERT without token types is a DistilBERT, a causal ModernBERT the decoder
    of that name, a Llama what its settings say, and with a bias of its head an ERNIE. FieldError for a causal BERT."""
    if model.family == "llama":
        return _LLAMA_WITH_HEAD_BIAS if head_bias else _FAMILIES[decoders.kind_of(model)]
    if model.family == "bert" and model.is_causal:
        rule, hint = "be false in a bert that is exported", "a modernbert is exported either way"
        raise FieldError("model.is_causal", rule, got="true", hint=hint)
    if model.family == "modernbert" and model.is_causal:
        return _FAMILIES["modernbert-decoder"]
    return _FAMILIES["distilbert" if model.family == "bert" and not model.token_types else model.family]


def family_named(content: Mapping[str, Any]) -> Family:
    """The kind of a folder, by its config.json; FieldError for one we do not have."""
    kind = content.get("model_type")
    if kind not in _FAMILIES:
        raise FieldError("config.json: model_type", f"be one of {', '.join(_FAMILIES)}", got=kind)
    return _FAMILIES[kind]
