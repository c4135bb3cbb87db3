"""What a trained model becomes when it is exported: decided once, before anything is written."""

from __future__ import annotations

from dataclasses import dataclass

from megahead.config import HeadName
from megahead.convert.export_heads import Head, make_head
from megahead.convert.families import Family, family_of
from megahead.convert.source import TrainedModel


@dataclass(frozen=True)
class ExportTarget:
    """A trained model, and what of it goes out as what."""

    model: TrainedModel
    head: Head

    family: Family
    """Names and classes of Hugging Face's."""

    vocab_size: int
    """Rows of the exported embedding and of the head."""

    dtype: str
    """Of the stored weights."""

    @staticmethod
    def of(model: TrainedModel, head: HeadName, dtype: str, *, keep_padding: bool) -> ExportTarget:
        """With a head of this name; UserError where the model cannot have it, or is none of transformers'."""
        made = make_head(head, model, keep_padding=keep_padding)
        family = family_of(model.config.model, head_bias=made.bias_V is not None)
        vocab_size = model.config.model.padded_vocab_size() if keep_padding else model.config.model.vocab_size
        return ExportTarget(model.used(), made, family, vocab_size, dtype)

    def guesses_masked(self) -> bool:
        """Whether its head is one for masked tokens, and not for next ones."""
        return self.family.auto_with_head == "AutoModelForMaskedLM"

    def has_head(self) -> bool:
        """Whether it predicts tokens, and is not the backbone alone."""
        return self.head.matrix is not None
