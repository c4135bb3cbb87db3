"""Turns text into indexed datasets: chunks are encoded in worker processes, in the order of the input."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Literal

import numpy as np

from megahead.data.indexed import Array, token_dtype
from megahead.data.records import Chunk, Selection
from megahead.data.sources import find_inputs, input_names, max_documents, pin_hub_revisions, read_chunks, total_bytes
from megahead.data.tokenizer import Engine, Tokenizer, load_tokenizer
from megahead.data.vocabulary_map import ROLES
from megahead.data.writer import NO_PROGRESS, IndexedDatasetWriter, ProgressBar
from megahead.errors import DataError, FieldError
from megahead.wording import pluralize

CHUNKS_PER_WORKER = 3
BYTES_PER_WORKER = 32 << 20
OnError = Literal["fail", "skip"]


def encode_chunk(recipe: Recipe, path: Path, engine: Engine, end_token: int, chunk: Chunk) -> EncodedChunk:
    """The ids of the chunk's documents, by the tokenizer in `path` and the library that `load_tokenizer` chose.
    DataError for a broken record, unless `on_error` is "skip"."""
    parsed = chunk.parse()
    texts = parsed.require_texts() if recipe.on_error == "fail" else parsed.texts
    tokenizer, tail, held_out = Tokenizer(path, engine), recipe.holdout_tail, None
    if tail is not None:
        parts = [part for text in texts for part in _split_tail(text, tail)]
        texts, held_out = [text for text, _ in parts], np.array([is_tail for _, is_tail in parts], bool)
    tokens, lengths = tokenizer.encode_flat(texts)
    has_tokens = lengths > 0
    ends = np.cumsum(lengths)[has_tokens]
    tokens = np.insert(tokens.astype(token_dtype(tokenizer.vocab_size), copy=False), ends, end_token)
    text_bytes = np.array([len(text) if text.isascii() else len(text.encode()) for text in texts], np.int64)
    report = PreprocessReport(
        skipped=len(parsed.empty_locations) + len(texts) - len(ends),
        broken=len(parsed.errors),
        left_out=parsed.num_filtered,
        empty_places=parsed.empty_locations,
        problems=parsed.errors,
    )
    held_out = None if held_out is None else held_out[has_tokens]
    lengths, text_bytes = lengths[has_tokens] + 1, text_bytes[has_tokens]
    return EncodedChunk(tokens, lengths, text_bytes, report, chunk.disk_bytes, held_out)


def _split_tail(text: str, share: Fraction) -> Iterator[tuple[str, bool]]:
    """(part, whether it is the tail) of a text, split at the end of a line or word; a single word stays whole."""
    limit = int(len(text) * (1 - share))
    end = text.rfind("\n", 1, limit) if "\n" in text[limit // 2 : limit] else text.rfind(" ", 1, limit)
    if end > 0 and text[:end].strip() and text[end:].strip():
        yield text[:end], False
        yield text[end:].lstrip(), True
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
    """Counts of what did not become a document; texts without any token are skipped, too."""

    disk_bytes: int
    """Bytes of the input on disk."""

    held_out: Array | None = None
    """bool: documents that are held out; None if that depends on their positions in the whole input."""


EncodeChunk = Callable[[Chunk], EncodedChunk]
EncodeChunks = Callable[[Iterable[Chunk], EncodeChunk], Iterator[EncodedChunk]]


@contextmanager
def encoding_pool(workers: int) -> Iterator[EncodeChunks]:
    """A function that encodes chunks in worker processes, in order; workers stay a few chunks ahead of the reader. A
    single worker is this process itself.

    An error in a chunk is raised when that chunk would be yielded. DataError if a worker dies.
    """
    if workers <= 1:
        yield lambda chunks, encode_one: map(encode_one, chunks)
        return
    # Neither fork (the tokenizers' threads would not survive it) nor spawn (each worker would import everything).
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_initialize_worker)
    try:
        yield partial(_encode_ahead, pool, CHUNKS_PER_WORKER * workers)
    finally:
        pool.shutdown(cancel_futures=True)


def _encode_ahead(
    pool: ProcessPoolExecutor, max_pending: int, chunks: Iterable[Chunk], encode_one: EncodeChunk
) -> Iterator[EncodedChunk]:
    pending: deque[Future[EncodedChunk]] = deque()
    try:
        for chunk in chunks:
            pending.append(pool.submit(encode_one, chunk))
            if len(pending) >= max_pending:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise DataError("every worker process must live to the end, but one was killed; lower --workers.") from error


def suitable_workers(total_bytes: int | None, cores: int) -> int:
    """The number of worker processes that pay off: one per 32 MB of input on disk, as each warms up its own caches."""
    return cores if total_bytes is None else max(1, min(cores, total_bytes // BYTES_PER_WORKER))


def _initialize_worker() -> None:
    os.environ["RAYON_NUM_THREADS"] = "1"  # read once by both libraries when they start their threads
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends its workers
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """Exits when the parent is killed: a pool's workers would wait for work forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


END_TOKEN = "<|endoftext|>"
EndInside = Literal["report", "fail"]
PROBE_DOCUMENTS = 64
PROBE_CHARACTERS = 1_000
MAX_LOCATIONS = 100


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The settings of preprocessing: equal recipes make equal files from equal text."""

    tokenizer: Path
    """tokenizer.json, or a SentencePiece .model."""

    selection: Selection = field(default_factory=Selection)
    end_token: str | None = None
    """Spelling of the token that closes each document; None for the tokenizer's own (`end_token_id`)."""

    holdout: Fraction | None = None
    """Share of the documents that goes to `OUTPUT-validation`."""

    holdout_tail: Fraction | None = None
    """In place of `holdout`: the share of each document, at its end, that goes to `OUTPUT-validation`."""

    @property
    def held_out_share(self) -> Fraction | None:
        return self.holdout_tail or self.holdout

    on_error: OnError = "fail"
    """Whether a broken line ends the run, or is reported and left out."""

    end_inside: EndInside = "report"
    """Whether an end token inside a text, which splits its document, is reported or an error."""

    def require_held_out(self, documents: int, output: str | Path) -> None:
        """FieldError if `holdout` of this many documents is less than one."""
        if self.holdout is not None and self.holdout * documents < 1:
            got = f"{self.holdout} of {pluralize(documents, 'document')}"
            fix = f"give an N of at most {documents:,}, or add documents"
            if documents == 1:
                fix = "give --holdout-tail 0.05, which holds out the end of each document"
            raise FieldError("holdout", f"hold out a document of `{output}`", got=got, hint=fix)

    def require_distinct_names(self, output: str | Path, inputs: Iterable[Path]) -> None:
        """DataError if the description of a dataset (`PREFIX.json`) would replace one of `inputs`, or the tokenizer."""
        written = {Path(f"{prefix}.json").resolve() for prefix in self.outputs(output)}
        if path := next((path for path in (self.tokenizer, *inputs) if path.resolve() in written), None):
            raise DataError(
                f"`{path}` must not be named like the dataset's description, but `{output}` would write over it; give "
                "one of them another name."
            )

    def outputs(self, output: str | Path) -> list[str]:
        """The prefixes of the datasets that it writes: two if documents are held out."""
        return [str(output)] if self.held_out_share is None else [str(output), f"{output}-validation"]


@dataclass
class PreprocessReport:
    """Counts of what a run wrote and left out."""

    documents: int = 0
    held_out: int = 0
    tokens: int = 0
    """Tokens of both datasets, end tokens included."""

    text_bytes: int = 0
    skipped: int = 0
    """Documents without text."""

    broken: int = 0
    """Lines that could not be read."""

    left_out: int = 0
    """Documents that the selection filters out."""

    end_inside: int = 0
    """End tokens inside texts, each of which splits a document."""

    engine: str = ""
    """The library that tokenized."""

    empty_places: list[str] = field(default_factory=list)
    """`FILE:LINE` of the first documents without text."""

    problems: list[str] = field(default_factory=list)
    """A sentence with `FILE:LINE` for the first broken lines."""

    def require_documents(self, output: str | Path, recipe: Recipe) -> None:
        """DataError if `output` has no document, FieldError if none is held out although some should be."""
        if not self.documents:
            causes = {"without text": self.skipped, "broken": self.broken, "not wanted (--keep, --drop)": self.left_out}
            reason = ", ".join(f"{count:,} {cause}" for cause, count in causes.items() if count) or "it is empty"
            raise DataError(f"`{output}` must have at least one document, but its input gives none: {reason}.")
        if recipe.holdout_tail is not None and not self.held_out:
            rule, got = f"hold out the end of a document of `{output}`", f"{recipe.holdout_tail} of single words"
            raise FieldError("holdout_tail", rule, got=got, hint="add longer documents")
        recipe.require_held_out(self.documents, output)

    def add(self, other: PreprocessReport) -> None:
        """Adds the report of another part of the input."""
        for name in ("documents", "held_out", "tokens", "text_bytes", "skipped", "broken", "left_out", "end_inside"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.engine = other.engine if self.engine in ("", other.engine) else "several engines"
        self.empty_places += other.empty_places[: MAX_LOCATIONS - len(self.empty_places)]
        self.problems += other.problems[: MAX_LOCATIONS - len(self.problems)]


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
    source: str | None = None,
    workers: int = 1,
    progress: ProgressBar = NO_PROGRESS,
) -> PreprocessReport:
    """Writes `OUTPUT.bin`, `.idx` and `.json`, and `OUTPUT-validation.*` when `holdout` (a share of the documents) or
    `holdout_tail` (the end of each, where they are few) is given.

    Documents keep their order and are closed by `end_token`; those without text are left out. An end token inside a
    text splits its document: that is reported, or with `end_inside="fail"` an error. `source` names the text in
    `OUTPUT.json` and model cards; its default is the names of the inputs, without paths. The result depends on neither
    `workers` nor the machine. Memory: a few chunks of 4 MB per worker. Most errors are a
    DataError that names file and line; so is a dataset without documents. After an error this run leaves no
    files, and existing datasets of these names are untouched.
    """
    recipe = Recipe(
        tokenizer=Path(tokenizer),
        selection=selection or Selection(),
        end_token=end_token,
        holdout=None if holdout is None else parse_holdout(holdout),
        holdout_tail=None if holdout_tail is None else parse_holdout(holdout_tail),
        on_error=on_error,
        end_inside=end_inside,
    )
    inputs = pin_hub_revisions(inputs)
    items = find_inputs(inputs)
    if (documents := max_documents(items)) is not None:
        recipe.require_held_out(documents, output)  # before anything that takes long
    recipe.require_distinct_names(output, [file for item in items for file in item.files])
    progress.start(total_bytes(items))
    with encoding_pool(workers) as encode:
        chunks, source = read_chunks(items, recipe.selection), source or input_names(inputs)
        return write_dataset(chunks, recipe, output, encode, progress, source)


def write_dataset(
    chunks: Iterator[Chunk],
    recipe: Recipe,
    output: str | Path,
    encode: EncodeChunks,
    progress: ProgressBar,
    source: str,
) -> PreprocessReport:
    """Writes one dataset (and its held-out part) of all `chunks`, whole or not at all."""
    first = list(islice(chunks, 1))
    probe = [text[:PROBE_CHARACTERS] for chunk in first for text in chunk.parse().texts[:PROBE_DOCUMENTS]]
    tokenizer = load_tokenizer(recipe.tokenizer, probe)
    end = end_token_id(tokenizer, recipe.end_token)
    encode_one = partial(encode_chunk, recipe, tokenizer.path, tokenizer.engine, end)
    report, size, file, identity = PreprocessReport(), tokenizer.vocab_size, tokenizer.path, tokenizer.identity()
    open_writer = partial(
        IndexedDatasetWriter, vocab_size=size, tokenizer=identity, tokenizer_file=file, end_token=end, source=source
    )
    with ExitStack() as stack:
        writers = [stack.enter_context(open_writer(prefix)) for prefix in recipe.outputs(output)]
        for encoded in encode(chain(first, chunks), encode_one):
            _add_documents(encoded, writers, recipe.held_out_share)
            report.add(encoded.report)
            progress.advance(encoded.disk_bytes, int(encoded.text_bytes.sum()))
        dropout = f", without its dropout of {tokenizer.dropout:g}" if tokenizer.dropout else ""
        report.engine = f"{tokenizer.engine}{dropout}"
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
                f"texts must not spell the end token {tokenizer.spellings(end + 1)[end]}, which splits documents, but "
                f"do so at {pluralize(report.end_inside, 'place')}; remove it there, or name another --end-token."
            )
    return report


def end_token_id(tokenizer: Tokenizer, end_token: str | None) -> int:
    """The id of `end_token`; by default of the first that exists: END_TOKEN, a SentencePiece model's, ROLES["end"].

    FieldError if the tokenizer has no such token.
    """
    defaults = [name for name in dict.fromkeys((END_TOKEN, *ROLES["end"])) if tokenizer.find(name) is not None]
    if end_token is None and END_TOKEN not in defaults and "end" in tokenizer.special_ids:
        return tokenizer.special_ids["end"]
    token = next(iter(defaults), END_TOKEN) if end_token is None else end_token
    id_ = tokenizer.find(token)
    if id_ is None:
        hint = f"name {' or '.join(defaults)}" if defaults else "name the token that shall close documents"
        raise FieldError("--end-token", f"be a token of the tokenizer `{tokenizer.path}`", got=token, hint=hint)
    return id_


def parse_holdout(holdout: Fraction | int) -> Fraction:
    """The fraction of documents held out: `holdout` itself below 1, one in `holdout` from 2 on."""
    share = Fraction(holdout)
    if not (0 < share < 1 or (share >= 2 and share.denominator == 1)):
        raise FieldError("holdout", "be a fraction between 0 and 1, or a number N >= 2 for every N-th", got=holdout)
    return share if share < 1 else 1 / share


def _add_documents(encoded: EncodedChunk, writers: Sequence[IndexedDatasetWriter], share: Fraction | None) -> None:
    """Appends the chunk's documents to the training or the held-out dataset. Held-out documents are evenly spread: of
    the first n, floor(share * n)."""
    if share is None:
        writers[0].add_documents(encoded.tokens, encoded.lengths, int(encoded.text_bytes.sum()))
        return
    held_out = encoded.held_out
    if held_out is None:
        first = sum(writer.num_documents for writer in writers)
        numbers = range(first, first + len(encoded.lengths) + 1)  # Python integers: a share may have 20 digits
        held_out = np.diff([number * share.numerator // share.denominator for number in numbers]) > 0
    for writer, selected in zip(writers, (~held_out, held_out), strict=True):
        tokens = encoded.tokens[np.repeat(selected, encoded.lengths)]
        writer.add_documents(tokens, encoded.lengths[selected], int(encoded.text_bytes[selected].sum()))
