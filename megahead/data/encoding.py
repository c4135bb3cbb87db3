"""Chunks of text into chunks of ids, in this process or in worker processes, always in input order."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from megahead.data.layout import token_dtype
from megahead.data.sources import Chunk
from megahead.data.tokenizer import Engine, Tokenizer
from megahead.errors import DataError

CHUNKS_PER_WORKER = 3
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Encoder:
    """How a chunk becomes ids: the tokenizer's file, the engine found exact, the id that closes each document."""

    path: Path
    engine: Engine
    end_token: int

    def encode(self, chunk: Chunk) -> EncodedChunk:
        """The ids of the chunk's documents; those without any text are left out and counted."""
        tokenizer = _loaded(self.path, self.engine)
        all_texts = chunk.texts()
        texts = [text for text in all_texts if text and not text.isspace()]
        tokens, lengths = tokenizer.encode_flat(texts)
        text_bytes = np.array([len(text.encode()) for text in texts], np.int64)
        kept = lengths > 0  # a tokenizer may know no character of a text
        ends = np.cumsum(lengths)[kept]
        tokens = np.insert(tokens.astype(token_dtype(tokenizer.vocab_size)), ends, self.end_token)
        skipped = len(all_texts) - int(kept.sum())
        return EncodedChunk(tokens, lengths[kept] + 1, text_bytes[kept], skipped, chunk.consumed)


@dataclass(frozen=True)
class EncodedChunk:
    """The documents of one chunk, their tokens back to back."""

    tokens: Array
    """Ids, each document closed by the end token."""

    lengths: Array
    """int64: tokens of each document."""

    text_bytes: Array
    """int64: UTF-8 bytes of each document."""

    skipped: int
    """Documents without text."""

    consumed: int
    """Bytes of the input on disk."""


def encode_chunks(chunks: Iterable[Chunk], encoder: Encoder, workers: int) -> Iterator[EncodedChunk]:
    """Each chunk encoded, in order: here for one worker, else by `workers` processes, a few chunks ahead of the reader.

    An error of a chunk surfaces at its turn. DataError when a worker dies.
    """
    if workers <= 1:
        yield from map(encoder.encode, chunks)
        return
    # Neither fork (the engines' thread pools would not survive it) nor spawn (each worker would import everything).
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_use_one_thread)
    pending: deque[Future[EncodedChunk]] = deque()
    try:
        for chunk in chunks:
            pending.append(pool.submit(encoder.encode, chunk))
            if len(pending) >= CHUNKS_PER_WORKER * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise DataError("every worker process must live to the end, but one was killed; lower --workers.") from error
    finally:
        pool.shutdown(cancel_futures=True)


@cache
def _loaded(path: Path, engine: Engine) -> Tokenizer:
    return Tokenizer(path, engine)


def _use_one_thread() -> None:
    os.environ["RAYON_NUM_THREADS"] = "1"  # read once by both engines when they start their threads
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
