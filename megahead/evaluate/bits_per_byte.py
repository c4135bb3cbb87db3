"""Bits per byte of a decoder on any text, the measure of lm-eval's WikiText task, comparable across tokenizers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from math import log, sqrt
from pathlib import Path
from typing import TYPE_CHECKING

from megahead.corpus.selection import Selection
from megahead.corpus.sources import find_inputs, read_chunks
from megahead.evaluate.results import Score

if TYPE_CHECKING:
    from megahead.evaluate.language_models import LanguageModel


def documents(file: Path, limit: int | None) -> list[str]:
    """The first `limit` documents of a file in any format that `megahead preprocess` reads."""
    texts = (text for chunk in read_chunks(find_inputs([file]), Selection()) for text in chunk.parse().strict())
    return list(islice(texts, limit))


def bits_per_byte(model: LanguageModel, texts: Sequence[str]) -> list[Score]:
    """Over all documents together, each read from its beginning; the standard error is that of a ratio of two sums."""
    bits = [-nats / log(2) for nats in model.log_probabilities(texts)]
    sizes = [len(text.encode()) for text in texts]
    count, value = len(texts), sum(bits) / sum(sizes)
    if count < 2:
        return [Score("bits_per_byte", value, None)]
    squares = sum((spent - value * size) ** 2 for spent, size in zip(bits, sizes, strict=True))
    return [Score("bits_per_byte", value, sqrt(squares * count / (count - 1)) / sum(sizes))]
