"""Turns text into indexed datasets: chunks are encoded in worker processes, in the order of the input."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megahead.data.indexed import Array, token_dtype
from megahead.data.records import Chunk, Selection
from megahead.data.sources import find_inputs, max_documents, read_chunks, total_bytes
from megahead.data.tokenizer import PIECE_CHARACTERS, Engine, Tokenizer, load_tokenizer, opened
from megahead.data.vocabulary_map import ROLES
from megahead.data.writer import ByteProgress, IndexedDatasetWriter
from megahead.errors import DataError, FieldError
from megahead.wording import pluralize

CHUNKS_PER_WORKER = 3
BYTES_PER_WORKER = 32 << 20
OnError = Literal["fail", "skip"]


@dataclass(frozen=True)
class ChunkTokenizer:
    """How a chunk becomes ids: the tokenizer's file, the engine (a library that was found to be exact), and the id that
    closes each document."""

    path: Path
    engine: Engine
    end_token: int
    on_error: OnError = "fail"
    tail: Fraction | None = None
    """Share of each document that is one of its own, held out."""

    def encode(self, chunk: Chunk) -> EncodedChunk:
        """The ids of the chunk's documents. DataError for a broken document, unless `on_error` says to skip them."""
        parsed = chunk.parse()
        texts = parsed.strict_texts() if self.on_error == "fail" else parsed.texts
        tokenizer, held = opened(self.path, self.engine), None
        if self.tail is not None:
            cut = [part for text in texts for part in _cut(text, self.tail)]
            texts, held = [text for text, _ in cut], np.array([tail for _, tail in cut], bool)
        tokens, lengths = tokenizer.encode_flat(texts)
        kept = lengths > 0
        held = None if held is None else held[kept]
        ends = np.cumsum(lengths)[kept]
        tokens = np.insert(tokens.astype(token_dtype(tokenizer.vocab_size), copy=False), ends, self.end_token)
        text_bytes = np.array([_utf8_bytes(text) for text in texts], np.int64)[kept]
        report = PreprocessReport(
            skipped=len(parsed.empty_locations) + len(texts) - len(ends),
            broken=len(parsed.errors),
            left_out=parsed.num_filtered,
            empty_places=parsed.empty_locations,
            problems=parsed.errors,
        )
        return EncodedChunk(tokens, lengths[kept] + 1, text_bytes, report, chunk.disk_bytes, held)


def _cut(text: str, tail: Fraction) -> Iterator[tuple[str, bool]]:
    """A text and its end, which is True, cut at the last line or word that ends before; a text of one word is whole."""
    most = int(len(text) * (1 - tail))
    at = text.rfind("\n", 1, most) if "\n" in text[most // 2 : most] else text.rfind(" ", 1, most)
    if at > 0 and text[:at].strip() and text[at:].strip():
        yield text[:at], False
        yield text[at:].lstrip(), True
    else:
        yield text, False


@dataclass(frozen=True)
class EncodedChunk:
    """The documents of one chunk, their tokens concatenated."""

    tokens: Array
    """Ids, each document closed by the end token."""

    lengths: Array
    """int64: tokens of each document."""

    text_bytes: Array
    """int64: UTF-8 bytes of each document."""

    report: PreprocessReport
    """What did not become a document; those of which the tokenizer knows no character are skipped, too."""

    consumed: int
    """Bytes of the input on disk."""

    held: Array | None = None
    """bool: documents that are held out; None where their numbers decide."""


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

    def __exit__(self, *_: object) -> None:
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
    return sum(len(text[start : start + PIECE_CHARACTERS].encode()) for start in range(0, len(text), PIECE_CHARACTERS))


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


END_TOKEN = "<|endoftext|>"
EndInside = Literal["report", "fail"]
PROBE_DOCUMENTS = 64
PROBE_CHARACTERS = 1_000
PLACES_KEPT = 100


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings by which text becomes a dataset: equal recipes make equal files from equal text."""

    tokenizer: Path
    """tokenizer.json, or a SentencePiece .model."""

    selection: Selection = field(default_factory=Selection)
    end_token: str | None = None
    """Spelling of the token that closes each document; None for the tokenizer's own (`end_token_id`)."""

    holdout: Fraction | None = None
    """Share of the documents that goes to `OUTPUT-validation`."""

    holdout_tail: Fraction | None = None
    """Instead, the share of each document, its end, that goes there."""

    @property
    def held_out(self) -> Fraction | None:
        return self.holdout_tail or self.holdout

    on_error: OnError = "fail"
    """Whether a broken line ends the run, or is reported and left out."""

    end_inside: EndInside = "report"
    """Whether texts may spell the end token, and so be cut there."""

    def require_held_out(self, documents: int, output: str | Path) -> None:
        """FieldError where a share of so many documents was to be held out and is none."""
        if self.holdout is not None and self.holdout * documents < 1:
            got = f"{self.holdout} of {pluralize(documents, 'document')}"
            fix = f"give an N of at most {documents:,}, or add documents"
            if documents == 1:
                fix = "give --holdout-tail 0.05, which holds out the end of each document"
            raise FieldError("holdout", f"hold out a document of `{output}`", got=got, hint=fix)

    def outputs(self, output: str | Path) -> list[str]:
        """The prefixes of what it makes under this one: two where documents are held out."""
        return [str(output)] if self.held_out is None else [str(output), f"{output}-validation"]


@dataclass
class PreprocessReport:
    """What one run wrote, and what it left out."""

    documents: int = 0
    held_out: int = 0
    tokens: int = 0
    """Of both datasets, end tokens included."""

    text_bytes: int = 0
    skipped: int = 0
    """Documents without text."""

    broken: int = 0
    """Lines that could not be read."""

    left_out: int = 0
    """Documents that the selection does not want."""

    end_inside: int = 0
    """End tokens that texts spell, where a document seems to end."""

    engine: str = ""
    """The tokenizer backend: the library that tokenized."""

    empty_places: list[str] = field(default_factory=list)
    """`FILE:LINE` of the first documents without text."""

    problems: list[str] = field(default_factory=list)
    """A sentence with `FILE:LINE` for the first broken lines."""

    def require_documents(self, output: str | Path, recipe: Recipe) -> None:
        """DataError if `output` has no document, FieldError if a share of them was to be held out and none is."""
        if not self.documents:
            causes = {"without text": self.skipped, "broken": self.broken, "not wanted (--keep, --drop)": self.left_out}
            found = ", ".join(f"{count:,} {cause}" for cause, count in causes.items() if count) or "it is empty"
            raise DataError(f"`{output}` must have at least one document, but its input gives none: {found}.")
        if recipe.holdout_tail is not None and not self.held_out:
            rule, got = f"hold out the end of a document of `{output}`", f"{recipe.holdout_tail} of single words"
            raise FieldError("holdout_tail", rule, got=got, hint="add longer documents")
        recipe.require_held_out(self.documents, output)

    def add(self, other: PreprocessReport) -> None:
        """Adds the report of another part of the input."""
        for name in ("documents", "held_out", "tokens", "text_bytes", "skipped", "broken", "left_out", "end_inside"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.engine = other.engine if self.engine in ("", other.engine) else "several engines"
        self.empty_places += other.empty_places[: PLACES_KEPT - len(self.empty_places)]
        self.problems += other.problems[: PLACES_KEPT - len(self.problems)]


def preprocess(
    inputs: str | Path | Sequence[str | Path],
    tokenizer: str | Path,
    output: str | Path,
    *,
    selection: Selection | None = None,
    end_token: str | None = None,
    holdout: Fraction | int | None = None,
    holdout_tail: Fraction | None = None,
    on_error: OnError = "fail",
    end_inside: EndInside = "report",
    workers: int = 1,
    progress: ByteProgress | None = None,
) -> PreprocessReport:
    """Writes `OUTPUT.bin`, `.idx` and `.json`, and `OUTPUT-validation.*` when `holdout` (a share of the documents) or
    `holdout_tail` (the end of each, where they are few) is given.

    Documents keep their order and are closed by `end_token`; those without text are left out. Where a text spells
    `end_token`, a document seems to end: that is reported, or with `end_inside="fail"` an error. The result depends on
    neither `workers` nor the machine. Memory: a few chunks of 4 MB per worker. After an error (usually a DataError that
    names file and line, also for a dataset that would have no document) nothing of this run is left, and older datasets
    of these names are untouched.
    """
    recipe = Recipe(
        tokenizer=Path(tokenizer),
        selection=selection or Selection(),
        end_token=end_token,
        holdout=None if holdout is None else held_out_share(holdout),
        holdout_tail=None if holdout_tail is None else held_out_share(holdout_tail),
        on_error=on_error,
        end_inside=end_inside,
    )
    found = find_inputs(inputs)
    if (documents := max_documents(found)) is not None:
        recipe.require_held_out(documents, output)  # before anything that takes long
    progress = progress or ByteProgress()
    progress.start(total_bytes(found))
    with EncodingPool(workers) as pool:
        return write_dataset(read_chunks(found, recipe.selection), recipe, output, pool, progress)


def write_dataset(
    chunks: Iterator[Chunk], recipe: Recipe, output: str | Path, pool: EncodingPool, progress: ByteProgress
) -> PreprocessReport:
    """Writes one dataset (and its held-out part) of all `chunks`, whole or not at all."""
    if recipe.tokenizer.absolute() in {Path(f"{prefix}.json").absolute() for prefix in recipe.outputs(output)}:
        raise DataError(
            f"`{recipe.tokenizer}` must not be named like the dataset's description, but `{output}` would write over "
            "it; give one of them another name."
        )
    loaded, chunks = _choose_tokenizer(recipe.tokenizer, chunks)
    end = end_token_id(loaded, recipe.end_token)
    encoder = ChunkTokenizer(loaded.path, loaded.engine, end, recipe.on_error, recipe.holdout_tail)
    report = PreprocessReport()
    known: Any = {"vocab_size": loaded.vocab_size, "tokenizer": loaded.identity(), "tokenizer_file": loaded.path}
    with ExitStack() as stack:
        opened = (IndexedDatasetWriter(each, end_token=end, **known) for each in recipe.outputs(output))
        writers = [stack.enter_context(writer) for writer in opened]
        for encoded in pool.encode(chunks, encoder):
            _add(encoded, writers, recipe.held_out)
            report.add(encoded.report)
            progress.advance(encoded.consumed, int(encoded.text_bytes.sum()))
        without = f", without its dropout of {loaded.dropout:g}" if loaded.dropout else ""
        report.engine = f"{loaded.engine}{without}"
        report.documents = sum(writer.num_documents for writer in writers)
        report.held_out = sum(writer.num_documents for writer in writers[1:])
        report.tokens = sum(writer.num_tokens for writer in writers)
        report.text_bytes = sum(writer.text_bytes for writer in writers)
        report.require_documents(output, recipe)
        for writer in writers:
            writer.finish()  # whatever can fail does so before either dataset gets its name
        report.end_inside = sum(writer.count(end) - writer.num_documents for writer in writers)
        if report.end_inside and recipe.end_inside == "fail":
            raise DataError(
                f"texts must not spell the end token {loaded.spellings(end + 1)[end]}, which splits documents, but do "
                f"so at {pluralize(report.end_inside, 'place')}; remove it there, or name another --end-token."
            )
    return report


def end_token_id(tokenizer: Tokenizer, end_token: str | None) -> int:
    """The id of `end_token`; without it of the tokenizer's own: END_TOKEN, what a SentencePiece model names, or one of
    ROLES.

    FieldError where the tokenizer has no such token.
    """
    known = [name for name in dict.fromkeys((END_TOKEN, *ROLES["end"])) if tokenizer.find(name) is not None]
    if end_token is None and END_TOKEN not in known and "end" in tokenizer.roles:
        return tokenizer.roles["end"]
    spelled = next(iter(known), END_TOKEN) if end_token is None else end_token
    found = tokenizer.find(spelled)
    if found is None:
        hint = f"name {' or '.join(known)}" if known else "name the token that shall close documents"
        raise FieldError("--end-token", f"be a token of the tokenizer `{tokenizer.path}`", got=spelled, hint=hint)
    return found


def held_out_share(holdout: Fraction | int) -> Fraction:
    """The fraction of documents held out: `holdout` itself below 1, one in `holdout` from 2 on."""
    share = Fraction(holdout)
    if not (0 < share < 1 or (share >= 2 and share.denominator == 1)):
        raise FieldError("holdout", "be a fraction between 0 and 1, or a number N >= 2 for every N-th", got=holdout)
    return share if share < 1 else 1 / share


def _choose_tokenizer(path: Path, chunks: Iterator[Chunk]) -> tuple[Tokenizer, Iterator[Chunk]]:
    """The tokenizer, with the fast engine if that is exact on the first documents; and all chunks (first included)."""
    first = next(chunks, None)
    if first is None:
        return load_tokenizer(path), iter(())
    probe = [text[:PROBE_CHARACTERS] for text in first.parse().texts[:PROBE_DOCUMENTS]]
    return load_tokenizer(path, probe), chain([first], chunks)


def _add(encoded: EncodedChunk, writers: Sequence[IndexedDatasetWriter], share: Fraction | None) -> None:
    """Appends the chunk's documents to the dataset each belongs to. Held out are documents evenly spread: of the first
    n floor(share * n)."""
    if share is None:
        writers[0].add_documents(encoded.tokens, encoded.lengths, int(encoded.text_bytes.sum()))
        return
    held = encoded.held
    if held is None:
        numbers = sum(writer.num_documents for writer in writers) + np.arange(len(encoded.lengths) + 1)
        held = np.diff(numbers * share.numerator // share.denominator) > 0
    for writer, chosen in zip(writers, (~held, held), strict=True):
        tokens = encoded.tokens[np.repeat(chosen, encoded.lengths)]
        writer.add_documents(tokens, encoded.lengths[chosen], int(encoded.text_bytes[chosen].sum()))
