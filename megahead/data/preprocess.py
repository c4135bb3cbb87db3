"""Text files into one indexed dataset, or two when every k-th document is held out for validation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from megahead.data.encoding import EncodedChunk, Encoder, encode_chunks
from megahead.data.progress import ByteProgress, Silent
from megahead.data.sources import Chunk, check_inputs, read_chunks
from megahead.data.tokenizer import Tokenizer, load_tokenizer
from megahead.data.writer import IndexedDatasetWriter
from megahead.errors import FieldError

END_TOKEN = "<|endoftext|>"
PROBE_DOCUMENTS = 64
PROBE_CHARACTERS = 10_000
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class PreprocessReport:
    """What one run of `preprocess` wrote."""

    documents: int
    held_out: int
    skipped: int
    """Documents without text."""

    tokens: int
    """Of both datasets, end tokens included."""

    text_bytes: int
    engine: str
    """The library that tokenized."""


def preprocess(
    inputs: Sequence[str | Path],
    tokenizer: str | Path,
    output: str | Path,
    *,
    text_key: str = "text",
    end_token: str = END_TOKEN,
    holdout: Fraction | int | None = None,
    workers: int = 1,
    progress: ByteProgress | None = None,
) -> PreprocessReport:
    """Writes `OUTPUT.bin`, `.idx` and `.json`, and `OUTPUT-validation.*` when `holdout` is given.

    Documents keep their order and are closed by `end_token`; those without text are left out. The result depends on
    neither `workers` nor the machine. Memory: a few chunks of 4 MB a worker. After an error (DataError that names file
    and line, usually) nothing of this run is left, and older datasets of these names are untouched.
    """
    share = None if holdout is None else _share(holdout)
    progress = progress or Silent()
    progress.begin(check_inputs(inputs))
    loaded, chunks = _choose_tokenizer(tokenizer, read_chunks(inputs, text_key))
    encoder = Encoder(loaded.path, loaded.engine, loaded.id_of(end_token))
    with ExitStack() as stack:
        train = stack.enter_context(_writer(output, loaded))
        validation = train if share is None else stack.enter_context(_writer(f"{output}-validation", loaded))
        skipped = 0
        for encoded in encode_chunks(chunks, encoder, workers):
            _add(encoded, train, validation, share)
            skipped += encoded.skipped
            progress.advance(encoded.consumed, int(encoded.text_bytes.sum()))
        writers = [train] if share is None else [train, validation]
        for writer in writers:
            writer.finish()  # whatever can fail does so before either dataset gets its name
    return PreprocessReport(
        documents=sum(writer.num_documents for writer in writers),
        held_out=0 if share is None else validation.num_documents,
        skipped=skipped,
        tokens=sum(writer.num_tokens for writer in writers),
        text_bytes=sum(writer.text_bytes for writer in writers),
        engine=loaded.engine,
    )


def _share(holdout: Fraction | int) -> Fraction:
    """The fraction of documents held out: `holdout` itself below 1, one in `holdout` from 2 on."""
    share = Fraction(holdout) if holdout < 1 else 1 / Fraction(holdout)
    if not 0 < share < 1:
        raise FieldError("holdout", "be a fraction between 0 and 1, or a number N >= 2 for every N-th", got=holdout)
    return share


def _choose_tokenizer(path: str | Path, chunks: Iterator[Chunk]) -> tuple[Tokenizer, Iterable[Chunk]]:
    """The fast engine if it is exact on the first documents; the chunks are handed back complete."""
    first = next(chunks, None)
    if first is None:
        return load_tokenizer(path), ()
    probe = [text[:PROBE_CHARACTERS] for text in first.texts()[:PROBE_DOCUMENTS]]
    return load_tokenizer(path, probe), chain([first], chunks)


def _writer(output: str | Path, tokenizer: Tokenizer) -> IndexedDatasetWriter:
    return IndexedDatasetWriter(output, vocab_size=tokenizer.vocab_size, tokenizer=tokenizer.path.name)


def _add(
    encoded: EncodedChunk, train: IndexedDatasetWriter, validation: IndexedDatasetWriter, share: Fraction | None
) -> None:
    """Appends the chunk's documents to the dataset each belongs to."""
    if share is None:
        train.add_documents(encoded.tokens, encoded.lengths, int(encoded.text_bytes.sum()))
        return
    numbers = train.num_documents + validation.num_documents + np.arange(len(encoded.lengths))
    held = _held_out(numbers, share)
    for writer, chosen in ((train, ~held), (validation, held)):
        tokens = encoded.tokens[np.repeat(chosen, encoded.lengths)]
        writer.add_documents(tokens, encoded.lengths[chosen], int(encoded.text_bytes[chosen].sum()))


def _held_out(numbers: Array, share: Fraction) -> Array:
    """Which document numbers are held out: evenly spread, floor(share * n) of the first n (1/k: every k-th)."""
    above, below = share.numerator, share.denominator
    held: Array = (numbers + 1) * above // below > numbers * above // below
    return held
