"""What Hugging Face calls the parts and settings of BERT, and of DistilBERT, which is it without types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megahead.config import ModelConfig
from megahead.convert.renames import Renames
from megahead.errors import FieldError

_EPS = 1e-12  # DistilBERT's, which its settings cannot say


@dataclass(frozen=True)
class Names:
    """Parameter names of one kind of model: with a head, or alone and without `prefix`."""

    prefix: str
    """Begins the backbone's names in a model with a head."""

    table: Renames
    ignored: tuple[str, ...]
    """Parts of names of what is no parameter of ours: poolers, buffers, the head's copy of a tied weight."""

    heads: tuple[str, ...]
    """What the head's names begin with."""

    def ours(self, theirs: str) -> str | None:
        """Our name of a stored tensor of theirs, in a model with a head or without; None for what we leave out.

        Raises FieldError for a name that this kind of model does not have.
        """
        if any(part in theirs for part in self.ignored):
            return None
        name = theirs.replace(".gamma", ".weight").replace(".beta", ".bias")  # as TensorFlow called them
        if not name.startswith((self.prefix, *self.heads)):
            name = self.prefix + name
        ours = self.table.ours(name)
        if ours is None:
            kind = self.prefix.removesuffix(".")
            raise FieldError("model", f"hold tensors of a {kind} model only", got=f"one that has {theirs}")
        return ours


BERT = Names(
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
            "mask_head": "cls.predictions",
            "head": "cls.predictions.decoder",
        }
    ),
    ignored=("pooler.", "cls.seq_relationship.", "position_ids", "cls.predictions.decoder.bias"),
    heads=("cls.",),
)

DISTILBERT = Names(
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
            "mask_head": "vocab_projector",
            "head": "vocab_projector",
        }
    ),
    ignored=("position_ids",),
    heads=("vocab_",),
)
