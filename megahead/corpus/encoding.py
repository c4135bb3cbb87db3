"""Turns chunks of text into chunks of ids, in this process or in worker processes, always in input order."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np

from megahead.corpus.chunks import Chunk
from megahead.corpus.index_layout import token_dtype
from megahead.corpus.long_texts import PIECE
from megahead.corpus.tokenizer import Engine, Tokenizer, opened
from megahead.errors import DataError

CHUNKS_PER_WORKER = 3
BYTES_PER_WORKER = 32 << 20
OnError = Literal["fail", "skip"]
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class ChunkTokenizer:
    """How a chunk becomes ids: the tokenizer's file, the engine (a library that was found to be exact), and the id that
    closes each document."""

    path: Path
    engine: Engine
    end_token: int
    on_error: OnError = "fail"

    def encode(self, chunk: Chunk) -> EncodedChunk:
        """The ids of the chunk's documents. DataError for a broken document, unless `on_error` says to skip them."""
        parsed = chunk.parse()
        texts = parsed.strict() if self.on_error == "fail" else parsed.texts
        tokenizer = opened(self.path, self.engine)
        tokens, lengths = tokenizer.encode_flat(texts)
        text_bytes = np.array([_utf8_bytes(text) for text in texts], np.int64)
        tokens, lengths, text_bytes = self._closed(tokenizer, tokens, lengths, text_bytes)
        unknown = len(texts) - len(lengths)
        return EncodedChunk(
            tokens, lengths, text_bytes, parsed.empty, unknown, parsed.broken, parsed.left_out, chunk.consumed
        )

    def _closed(
        self, tokenizer: Tokenizer, tokens: Array, lengths: Array, text_bytes: Array
    ) -> tuple[Array, Array, Array]:
        """The same with an end token after each document, and without documents that have no tokens (the tokenizer
        knows none of their characters)."""
        kept = lengths > 0
        ends = np.cumsum(lengths)[kept]
        tokens = np.insert(tokens.astype(token_dtype(tokenizer.vocab_size), copy=False), ends, self.end_token)
        return tokens, lengths[kept] + 1, text_bytes[kept]


@dataclass(frozen=True)
class EncodedChunk:
    """The documents of one chunk, their tokens concatenated."""

    tokens: Array
    """Ids, each document closed by the end token."""

    lengths: Array
    """int64: tokens of each document."""

    text_bytes: Array
    """int64: UTF-8 bytes of each document."""

    empty: list[str]
    """`FILE:LINE` of documents without text."""

    unknown: int
    """Documents without a single character that the tokenizer knows."""

    broken: list[str]
    """A sentence for each line that could not be read."""

    left_out: int
    """Documents that were not wanted."""

    consumed: int
    """Bytes of the input on disk."""


class EncodingPool:
    """`with EncodingPool(workers) as pool`: worker processes, for any number of streams of chunks; none for one."""

    def __init__(self, workers: int) -> None:
        self.workers = max(workers, 1)
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> EncodingPool:
        if self.workers > 1:
            # Neither fork (the engines' threads would not survive it) nor spawn (each worker would import everything).
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload([__name__])
            self._pool = ProcessPoolExecutor(self.workers, mp_context=context, initializer=_prepare_worker)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def encode(self, chunks: Iterable[Chunk], encoder: ChunkTokenizer) -> Iterator[EncodedChunk]:
        """Each chunk encoded, in order; the workers stay a few chunks ahead of the reader.

        An error in a chunk is raised when that chunk would be yielded. DataError if a worker dies.
        """
        if self._pool is None:
            yield from map(encoder.encode, chunks)
            return
        pending: deque[Future[EncodedChunk]] = deque()
        try:
            for chunk in chunks:
                pending.append(self._pool.submit(encoder.encode, chunk))
                if len(pending) >= CHUNKS_PER_WORKER * self.workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool as error:
            raise DataError(
                "every worker process must live to the end, but one was killed; lower --workers."
            ) from error


def suitable_workers(total_bytes: int | None, cores: int) -> int:
    """How many worker processes pay off: one per 32 MB of input on disk, as each must warm up its own caches."""
    return cores if total_bytes is None else max(1, min(cores, total_bytes // BYTES_PER_WORKER))


def _utf8_bytes(text: str) -> int:
    if text.isascii():
        return len(text)
    return sum(len(text[start : start + PIECE].encode()) for start in range(0, len(text), PIECE))


def _prepare_worker() -> None:
    os.environ["RAYON_NUM_THREADS"] = "1"  # read once by both engines when they start their threads
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Ends this worker when its parent was killed: a pool's workers would wait for work forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
