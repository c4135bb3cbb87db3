"""Pseudo-perplexity of an encoder (Salazar et al. 2020, arXiv 1910.14659): each token predicted from all others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, fsum
from pathlib import Path

import torch

from megahead.convert import context_length, load_masked, load_tokenizer_folder
from megahead.errors import DataError
from megahead.evaluate.masked_rows import MaskedRows
from megahead.evaluate.predictions import TokenPredictor


@dataclass(frozen=True)
class PseudoPerplexity:
    """How well the tokens of texts are predicted, each from the rest of its text."""

    tokens: int
    loss: float
    """Mean negative log-probability of a token in nats."""

    def perplexity(self) -> float:
        """exp(loss); not comparable with a decoder's, whose tokens see only what came before."""
        return exp(self.loss)


def pseudo_perplexity(
    model_dir: Path, texts: Sequence[str], *, max_length: int = 128, batch_size: int = 64
) -> PseudoPerplexity:
    """Scores every token of `texts` with the masked language model in `model_dir`; each text is cut at `max_length`
    tokens, and at the model's context.

    Cost: a forward pass over a text for each of its tokens. Raises CheckpointError for a folder without a masked
    language model or a tokenizer with [CLS], [SEP] and [MASK], DataError for texts without a token.
    """
    tokenizer, model = load_tokenizer_folder(model_dir), load_masked(model_dir)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    max_length = min(max_length, context_length(model_dir) or max_length)
    texts_rows = MaskedRows(tokenizer, model_dir).of_texts(texts, whole_words=False, max_length=max_length)
    rows = [row for rows in texts_rows for row in rows]
    if not rows:
        raise DataError("The texts must hold tokens to guess, but hold none.")
    nats = TokenPredictor(model, causal=False, batch_size=batch_size).log_probabilities(rows)
    return PseudoPerplexity(len(rows), -fsum(nats) / len(rows))
