"""The kinds of models that go out and come in: one entry each, so that exporting and importing know no names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megahead.config.model import ModelConfig
from megahead.errors import FieldError
from megahead.hf import bert, gpt_neox, llama, modernbert
from megahead.hf import llama as ernie
from megahead.hf import modernbert as modernbert_decoder


def _as_it_is(_: ModelConfig, __: str, tensor: Tensor) -> Tensor:
    return tensor


def _none(_: ModelConfig) -> dict[str, int]:
    return {}


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

    our_names: Callable[[str], tuple[str, ...]]
    """Our names of the parameters in a stored tensor, several where it stacks them along dimension 0; none for a tensor
    that we do without, FieldError for an unknown one."""

    their_name: Callable[[str], str | None]
    """Name of our parameter in a model with a head; None where there is none."""

    settings: Callable[[Mapping[str, Any]], dict[str, Any]]
    """From the content of config.json to the settings of a ModelConfig."""

    config: Callable[[ModelConfig], dict[str, Any]]
    """From a ModelConfig to the content of config.json."""

    untied_bias: str | None = None
    """A second name of an encoder's output bias, wanted beside an output matrix of its own."""

    head_bias: str | None = None
    """Name of a decoder's output bias; None where it has none."""

    as_stored: Callable[[ModelConfig, str, Tensor], Tensor] = _as_it_is
    """From a parameter of ours, with its name, to the tensor that theirs stores."""

    zeros: Callable[[ModelConfig], dict[str, int]] = _none
    """Vectors that theirs has and ours does without: names and sizes."""


def _llama(kind: str, title: str) -> Family:
    return Family(
        title,
        llama.BACKBONE_PREFIX,
        f"{title}Model",
        f"{title}ForCausalLM",
        "AutoModelForCausalLM",
        llama.our_names,
        llama.RENAMES.theirs,
        llama.settings_of(kind),
        llama.llama_config,
    )


_FAMILIES = {
    "gpt_neox": Family(
        "GPT-NeoX",
        gpt_neox.BACKBONE_PREFIX,
        "GPTNeoXModel",
        "GPTNeoXForCausalLM",
        "AutoModelForCausalLM",
        gpt_neox.our_names,
        gpt_neox.RENAMES.theirs,
        gpt_neox.model_settings,
        gpt_neox.gpt_neox_config,
    ),
    "llama": _llama("llama", "Llama"),
    "mistral": _llama("mistral", "Mistral"),
    "qwen2": _llama("qwen2", "Qwen2"),
    "qwen3": _llama("qwen3", "Qwen3"),
    "bert": Family(
        "BERT",
        bert.BERT.prefix,
        "BertModel",
        "BertForMaskedLM",
        "AutoModelForMaskedLM",
        bert.BERT.ours,
        bert.BERT.table.theirs,
        bert.bert_settings,
        bert.bert_config,
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
        bert.distilbert_config,
    ),
    "modernbert": Family(
        "ModernBERT",
        modernbert.MODERNBERT.prefix,
        "ModernBertModel",
        "ModernBertForMaskedLM",
        "AutoModelForMaskedLM",
        modernbert.MODERNBERT.ours,
        modernbert.MODERNBERT.table.theirs,
        modernbert.modernbert_settings,
        modernbert.modernbert_config,
    ),
    "modernbert-decoder": Family(
        "ModernBERT decoder",
        modernbert_decoder.MODERNBERT_DECODER.prefix,
        "ModernBertDecoderModel",
        "ModernBertDecoderForCausalLM",
        "AutoModelForCausalLM",
        modernbert_decoder.MODERNBERT_DECODER.ours,
        modernbert_decoder.MODERNBERT_DECODER.table.theirs,
        modernbert_decoder.modernbert_decoder_settings,
        modernbert_decoder.modernbert_decoder_config,
    ),
}


_LLAMA_WITH_HEAD_BIAS = Family(
    "Llama (as an ERNIE 4.5 without experts, whose head has a bias)",
    llama.BACKBONE_PREFIX,
    "Ernie4_5_MoeModel",
    "Ernie4_5_MoeForCausalLM",
    "AutoModelForCausalLM",
    llama.our_names,
    llama.RENAMES.theirs,
    llama.settings_of("llama"),
    ernie.ernie_config,
    head_bias=ernie.HEAD_BIAS,
    as_stored=ernie.as_stored,
    zeros=ernie.zero_biases,
)


def family_of(model: ModelConfig, *, head_bias: bool = False) -> Family:
    """The kind that `model` is exported as: a BERT without token types is a DistilBERT, a causal ModernBERT the decoder
    of that name, a Llama what its settings say, and with a bias of its head an ERNIE. FieldError for a causal BERT."""
    if model.family == "llama":
        return _LLAMA_WITH_HEAD_BIAS if head_bias else _FAMILIES[llama.kind_of(model)]
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
