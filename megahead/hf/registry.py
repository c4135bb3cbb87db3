"""The models of Hugging Face that are imported and exported."""

from __future__ import annotations

from megahead.config.model import ModelConfig
from megahead.errors import FieldError
from megahead.hf.bert import BERT, DISTILBERT, ROBERTA, XLM_ROBERTA
from megahead.hf.families import Family
from megahead.hf.gpt import GPT2, GPT_NEOX
from megahead.hf.llama import GEMMA3, LLAMA_WITH_HEAD_BIAS, LLAMAS, model_type_of
from megahead.hf.modernbert import MODERNBERT, MODERNBERT_DECODER

DECODERS = {"gpt_neox": GPT_NEOX, **LLAMAS, "gpt2": GPT2, "gemma3_text": GEMMA3}
"""By `model_type`."""

ENCODERS = {
    "bert": BERT,
    "distilbert": DISTILBERT,
    "roberta": ROBERTA,
    "xlm-roberta": XLM_ROBERTA,
    "modernbert": MODERNBERT,
    "modernbert-decoder": MODERNBERT_DECODER,
}
"""By `model_type`; one of them is causal."""

FAMILIES = DECODERS | ENCODERS

WITH_POSITION_OFFSET = ("roberta", "xlm-roberta")
"""Types whose max_position_embeddings includes the rows before the first token's."""

WITH_POOLER = ("bert", *WITH_POSITION_OFFSET)
"""Types whose backbone has a pooler unless it is built without."""


def export_family(model: ModelConfig, *, head_bias: bool = False) -> Family:
    """Returns the family that `model` is exported as: a Llama as Llama, Qwen 2 or Qwen 3 by its settings, with a head
    bias as ERNIE 4.5; a BERT without token types as DistilBERT, a causal ModernBERT as ModernBERT decoder. FieldError
    for a causal BERT or RoBERTa, which transformers lacks."""
    if model.family == "llama":
        return LLAMA_WITH_HEAD_BIAS if head_bias else LLAMAS[model_type_of(model)]
    if model.family == "modernbert":
        return MODERNBERT_DECODER if model.is_causal else MODERNBERT
    if model.is_encoder() and model.is_causal:
        rule, hint = f"be false in a {model.family} that is exported", "a modernbert is exported either way"
        raise FieldError("model.is_causal", rule, got="true", hint=hint)
    families = {"gpt_neox": GPT_NEOX, "gpt2": GPT2, "gemma3": GEMMA3, "roberta": ROBERTA, "xlm_roberta": XLM_ROBERTA}
    return (families | {"bert": BERT if model.token_types else DISTILBERT})[model.family]
