"""Targets for benchmarks of the loss: of a text, or by Zipf's law. Needs no torch."""

from __future__ import annotations

import io
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import zstandard

from megahead.data.indexed import IndexedDataset
from megahead.data.tokenizer import load_tokenizer
from megahead.errors import DataError

VOCABULARY = 50304
TOKENS = 1_000_000
"""Of a text, so many are read: rows from here and there, as a shuffled batch has them."""

ROW = 512
ERROR_SIZE = 1024
"""Targets that errors against float64 are measured on."""

Array = np.ndarray[Any, Any]


def read_targets(source: str | None, tokenizer: str | None, least: int) -> Array:
    """int64, `least` targets or more: of an indexed dataset, of a text through a tokenizer, or by Zipf's law.

    DataError where the text is shorter than that.
    """
    generator = np.random.default_rng(0)
    if source is None:
        weights = 1 / (np.arange(VOCABULARY) + 2.7)  # Zipf-Mandelbrot
        return generator.choice(VOCABULARY, max(least, 2**15), p=weights / weights.sum())
    tokens = _tokens(source, tokenizer, max(TOKENS, -(-least // ROW) * ROW))
    rows = tokens[: len(tokens) // ROW * ROW].reshape(-1, ROW)
    if rows.size < least:
        raise DataError(
            f"`{source}` must hold {least:,} tokens in rows of {ROW}, as --sizes asks, but holds {rows.size:,}; name "
            "smaller sizes or a longer text."
        )
    return rows[generator.permutation(len(rows))].reshape(-1)


def _tokens(source: str, tokenizer: str | None, most: int) -> Array:
    """The first `most` tokens of a text, or all that it has."""
    if tokenizer is not None:
        return np.fromiter(islice(_encoded(Path(source), tokenizer), most), np.int64)
    dataset = IndexedDataset(source)
    dataset.expect_ids_below(VOCABULARY)
    return dataset.read(0, min(most, dataset.num_tokens)).astype(np.int64)


def _encoded(path: Path, tokenizer: str) -> Iterator[int]:
    """Token ids of a .jsonl or .jsonl.zst file's texts, 64 at a time."""
    encode = load_tokenizer(tokenizer).encode_batch
    with path.open("rb") as file:
        stream = zstandard.ZstdDecompressor().stream_reader(file) if path.suffix == ".zst" else file
        lines = io.TextIOWrapper(io.BufferedReader(stream), "utf-8")
        while texts := [orjson.loads(line)["text"] for line in islice(lines, 64)]:
            for ids in encode(texts):
                yield from ids
