"""Writes an encoder's vectors of texts, a row for each, for a search over one's own documents.

N texts, D features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megahead.data.records import Selection
from megahead.data.sources import Input, read_chunks, total_bytes
from megahead.data.writer import NO_PROGRESS, ByteProgress
from megahead.errors import DataError, FieldError
from megahead.evaluate.retrieval import MAX_TOKENS, TextEncoder
from megahead.files import AtomicFile
from megahead.hf.export import ensure_encoder_folder
from megahead.hf.loading import read_context_length
from megahead.hf.pooling import POOLINGS, PoolingName, max_text_tokens, read_pooling

_GROUP_TEXTS = 1024
"""Texts that are sorted by length together."""


@dataclass(frozen=True)
class TextVectorsReport:
    """Facts about written vectors."""

    num_texts: int
    size: int
    pooling: PoolingName
    num_truncated: int
    max_tokens: int
    """Of a text, [CLS] and [SEP] included; what follows was truncated."""


def write_text_vectors(
    model: Path,
    inputs: Sequence[Input],
    selection: Selection,
    output: Path,
    num_texts: int,
    *,
    pooling: PoolingName | None = None,
    batch_size: int | None = None,
    progress: ByteProgress = NO_PROGRESS,
) -> TextVectorsReport:
    """Writes `output` as .npy: float32 [N, D], the vectors of the texts of `inputs` in their order, of length 1.

    model: a Hugging Face folder, or a run or checkpoint, which is exported first. num_texts: N, by `count_texts`.
    pooling: None takes that of a folder of sentence-transformers. batch_size: as of `TextEncoder`. A text that is
    longer than the model was trained for is truncated. CheckpointError for a decoder; an earlier `output` is replaced
    at the end. Memory: 4 MB of text and the vectors of 1,024 texts.
    """
    folder = ensure_encoder_folder(model)
    pooling = pooling or read_pooling(folder)
    if pooling is None:
        hint = f"`{folder}` names none"
        raise FieldError("--pooling", f"be {' or '.join(POOLINGS)}", got="missing", hint=hint)
    max_tokens = max_text_tokens(folder, read_context_length(folder) or MAX_TOKENS)
    encoder, file, num_written = TextEncoder(folder, batch_size, max_tokens), AtomicFile(output), 0
    header = {"descr": "<f4", "fortran_order": False, "shape": (num_texts, encoder.size)}
    try:
        np.lib.format.write_array_header_1_0(file, header)
        for texts in _groups(inputs, selection, progress):
            file.write(encoder.vectors(texts)[pooling].cpu().numpy().astype("<f4").tobytes())
            num_written += len(texts)
        if num_written != num_texts:
            raise DataError(f"the input must hold {num_texts:,} texts, as before, but now holds {num_written:,}.")
        file.sync()
        file.publish()
    finally:
        file.discard()
    return TextVectorsReport(num_texts, encoder.size, pooling, encoder.num_truncated, max_tokens)


def count_texts(inputs: Sequence[Input], selection: Selection, progress: ByteProgress) -> int:
    """Returns the number of texts; DataError if there is none, or one is empty or cannot be read."""
    num_texts = sum(len(texts) for texts in _groups(inputs, selection, progress))
    if not num_texts:
        raise DataError(f"`{inputs[0].path}` must hold texts, but holds none.")
    return num_texts


def _groups(inputs: Sequence[Input], selection: Selection, progress: ByteProgress) -> Iterator[list[str]]:
    """Yields consecutive texts, up to 1,024 at once."""
    progress.start(total_bytes(inputs))
    for chunk in read_chunks(inputs, selection):
        parsed = chunk.parse()
        texts = parsed.require_texts()
        if parsed.empty_locations:
            raise DataError(f"`{parsed.empty_locations[0]}` must hold text, but is empty; remove it from the input.")
        for first in range(0, len(texts), _GROUP_TEXTS):
            group = texts[first : first + _GROUP_TEXTS]
            yield group
            progress.advance(chunk.disk_bytes * len(group) // len(texts), sum(len(text.encode()) for text in group))
