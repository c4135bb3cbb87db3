"""The encoders of Hugging Face that are imported and exported."""

from __future__ import annotations

from megahead.config.model import ModelConfig
from megahead.errors import FieldError
from megahead.hf.bert import BERT, DISTILBERT
from megahead.hf.families import Family
from megahead.hf.modernbert import MODERNBERT, MODERNBERT_DECODER
from megahead.hf.roberta import ROBERTA, XLM_ROBERTA

FAMILIES = {
    "bert": BERT,
    "distilbert": DISTILBERT,
    "roberta": ROBERTA,
    "xlm-roberta": XLM_ROBERTA,
    "modernbert": MODERNBERT,
    "modernbert-decoder": MODERNBERT_DECODER,
}
"""By `model_type`; one of them is causal."""

WITH_POSITION_OFFSET = ("roberta", "xlm-roberta")
"""Types whose max_position_embeddings count rows before that of the first token."""

WITH_POOLER = ("bert", *WITH_POSITION_OFFSET)
"""Types whose backbone has a pooler unless it is built without."""


def encoder_family(model: ModelConfig) -> Family:
    """Returns the family that `model` is exported as: a BERT without token types is a DistilBERT, a causal ModernBERT a
    ModernBERT decoder. FieldError for a causal BERT or RoBERTa."""
    if model.family == "modernbert":
        return MODERNBERT_DECODER if model.is_causal else MODERNBERT
    if model.is_causal:
        rule, hint = f"be false in a {model.family} that is exported", "a modernbert is exported either way"
        raise FieldError("model.is_causal", rule, got="true", hint=hint)
    families = {"bert": BERT if model.token_types else DISTILBERT, "roberta": ROBERTA, "xlm_roberta": XLM_ROBERTA}
    return families[model.family]
