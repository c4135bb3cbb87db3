"""The decoders of Hugging Face that are imported and exported."""

from __future__ import annotations

from megahead.config.model import ModelConfig
from megahead.hf.families import Family
from megahead.hf.gemma import GEMMA3
from megahead.hf.gpt2 import GPT2
from megahead.hf.gpt_neox import GPT_NEOX
from megahead.hf.llama import LLAMA_WITH_HEAD_BIAS, LLAMAS, model_type_of

FAMILIES = {"gpt_neox": GPT_NEOX, **LLAMAS, "gpt2": GPT2, "gemma3_text": GEMMA3}
"""By `model_type`."""


def decoder_family(model: ModelConfig, *, head_bias: bool = False) -> Family:
    """Returns the family that `model` is exported as: for a Llama that of its settings, with a head bias ERNIE."""
    if model.family == "llama":
        return LLAMA_WITH_HEAD_BIAS if head_bias else LLAMAS[model_type_of(model)]
    return {"gpt_neox": GPT_NEOX, "gpt2": GPT2, "gemma3": GEMMA3}[model.family]
