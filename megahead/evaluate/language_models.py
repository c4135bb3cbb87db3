"""Log-probabilities of whole texts, by a decoder, or by an encoder as pseudo-log-likelihoods (each token masked in
turn).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch

from megahead.convert import context_of, is_encoder, load_causal, load_masked, load_tokenizer_folder
from megahead.errors import DataError
from megahead.evaluate.first_token import first_token
from megahead.evaluate.masked_rows import MaskedRows
from megahead.evaluate.predictions import Row, TokenPredictor


class LanguageModel(Protocol):
    """A model that gives texts a probability."""

    model: Any
    """The Hugging Face model."""

    tokenizer: Any

    def log_probabilities(self, texts: Sequence[str]) -> list[float]:
        """Of each text, in nats: the sum over its tokens."""


def open_language_model(folder: Path, batch_size: int | None = None) -> LanguageModel:
    """The model in `folder` in fp32, on a GPU if there is one; CheckpointError if it lacks a head or a tokenizer.

    batch_size: rows of tokens at once; None: `TokenPredictor` chooses.
    """
    return (Encoder if is_encoder(folder) else Decoder)(folder, batch_size)


class Decoder:
    """Predicts each token of a text from those before it, within the model's context; the first from an end token."""

    def __init__(self, folder: Path, batch_size: int | None) -> None:
        self.tokenizer = load_tokenizer_folder(folder)
        self.model = _placed(load_causal(folder))
        self._predictor = TokenPredictor(self.model, causal=True, batch_size=batch_size)

    def log_probabilities(self, texts: Sequence[str]) -> list[float]:
        """As in lm-eval, a text longer than the context is read in windows, and each token is predicted in one."""
        encoded = self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        rows = [list(self._windows(ids)) for ids in encoded]
        return _by_text(rows, self._predictor)

    def _windows(self, ids: Sequence[int]) -> Iterator[Row]:
        """Windows of a text; the last one begins early enough to fill the context."""
        tokens, context = (first_token(self.tokenizer), *ids), context_of(self.model)
        for start, end in pairwise([*range(0, len(ids), context), len(ids)]):
            begin = max(0, end - context)
            yield Row(tokens[begin:end], tuple(range(start - begin, end - begin)), tokens[start + 1 : end + 1])


class Encoder:
    """Predicts each token of a text from all others, except those that follow in its own word (Kauf & Ivanova 2023)."""

    def __init__(self, folder: Path, batch_size: int | None) -> None:
        self.tokenizer = load_tokenizer_folder(folder)
        self.model = _placed(load_masked(folder))
        self._predictor = TokenPredictor(self.model, causal=False, batch_size=batch_size)
        self._rows = MaskedRows(self.tokenizer, folder)

    def log_probabilities(self, texts: Sequence[str]) -> list[float]:
        """Pseudo-log-likelihoods; DataError for a text longer than the context."""
        rows, context = self._rows.of_texts(texts, whole_words=True), context_of(self.model)
        for text, its in zip(texts, rows, strict=True):
            if len(its) + 2 > context:
                raise DataError(f"a text must have at most {context - 2} tokens, but has {len(its)}: {text[:40]!r}.")
        return _by_text(rows, self._predictor)


def _by_text(rows: Sequence[Sequence[Row]], predictor: TokenPredictor) -> list[float]:
    """Sums over the rows of each text."""
    found = iter(predictor.log_probabilities([row for its in rows for row in its]))
    return [sum(next(found) for _ in its) for its in rows]


def _placed(model: Any) -> Any:
    return model.to("cuda" if torch.cuda.is_available() else "cpu")
