"""What Hugging Face calls the parts and settings of a ModernBERT that is causal, and where it differs from one that is
not (Weller et al. 2025, arXiv 2507.11412)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megahead.config import ModelConfig
from megahead.convert.encoder_names import EncoderNames
from megahead.convert.modernbert import modernbert_config, modernbert_settings
from megahead.convert.renames import Renames
from megahead.errors import FieldError

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
