"""Writes indexed datasets, with progress."""

from __future__ import annotations

import hashlib
from array import array
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from megahead.data.indexed import (
    Array,
    DatasetInfo,
    FileFingerprint,
    IndexLayout,
    TokenizerIdentity,
    dataset_paths,
    token_dtype,
)
from megahead.data.sentencepiece_model import is_sentencepiece
from megahead.errors import ArgumentError, DataError
from megahead.files import AtomicFile, write_atomically
from megahead.remote_files import is_remote

FLUSH_TOKENS = 1 << 20
MAX_DOCUMENT_TOKENS = 2**31 - 1


class SavedTokenizer:
    """A tokenizer's file in a folder of datasets: itself if it lies there, else a copy named by its content, so that
    there is one for all datasets of the folder that it cut."""

    def __init__(self, source: Path, folder: Path) -> None:
        lies_there = source.parent.resolve() == folder.resolve()
        self._content = None if lies_there else source.read_bytes()
        ending = ".model" if is_sentencepiece(source) else ".json"
        self.name = source.name if self._content is None else f"tokenizer-{_short(self._content)}{ending}"
        self._path = folder / self.name

    def write(self) -> None:
        """Writes the copy, unless it is there."""
        if self._content is not None and not self._path.exists():
            write_atomically(self._path, self._content)


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:8]


class IndexedDatasetWriter:
    """`with IndexedDatasetWriter(prefix, vocab_size=V) as w: w.add_document(tokens)`: the files appear together at the
    end or not at all.

    Holds in memory about a million tokens, and 4 bytes per sequence and per document. An old dataset of this name is
    replaced on a clean exit and untouched after an error; a dataset without a token is one (DataError).
    """

    def __init__(
        self,
        prefix: str | Path,
        *,
        vocab_size: int,
        tokenizer: str | TokenizerIdentity | None = None,
        tokenizer_file: Path | None = None,
        end_token: int | None = None,
    ) -> None:
        """`tokenizer`: what cut the text, or at least the name of its file. `tokenizer_file`: that file, of which a
        copy is kept beside the dataset. `end_token`: what closes each document."""
        if is_remote(str(prefix)):
            raise DataError(
                f"a dataset must be written to a disk, but {prefix} is in a store; copy its files there then."
            )
        if not isinstance(vocab_size, int) or vocab_size < 1:
            raise ArgumentError("vocab_size", "be a whole number above 0", got=vocab_size)
        self.vocab_size = vocab_size
        self._cut_by = tokenizer if isinstance(tokenizer, TokenizerIdentity) else None
        self.tokenizer = tokenizer.name if isinstance(tokenizer, TokenizerIdentity) else tokenizer
        self.end_token = end_token
        self._kept = None if tokenizer_file is None else SavedTokenizer(tokenizer_file, Path(prefix).parent)
        self.dtype = token_dtype(vocab_size)
        self.num_tokens = self.text_bytes = 0
        self._lengths = array("i")
        self._document_sequences = array("i")  # how many each document has
        self._waiting: list[Array] = []
        self._waiting_tokens = 0
        self._counts = np.zeros(vocab_size, np.int64)
        self._digest = hashlib.sha256()
        self._finished = False
        with ExitStack() as staged:
            files = []
            for path in dataset_paths(prefix):
                files.append(AtomicFile(path))
                staged.callback(files[-1].discard)
            self._staged = staged.pop_all()  # all of them are open
        self._bin, self._idx, self._info = files

    @property
    def num_documents(self) -> int:
        """Documents added so far."""
        return len(self._document_sequences)

    def count(self, id_: int) -> int:
        """How often an id was added, once all is finished."""
        return int(self._counts[id_])

    def add_document(self, tokens: ArrayLike, text_bytes: int = 0) -> None:
        """Appends one document [tokens] made of `text_bytes` bytes of text. DataError for an id outside of
        the vocabulary, or what is no list of integers.

        Nothing is added to the tokens: an end token, if wanted, is their last.
        """
        tokens_N = np.asarray(tokens)
        if tokens_N.ndim != 1 or (tokens_N.size and tokens_N.dtype.kind not in "iu"):
            got = f"{list(tokens_N.shape)} of {tokens_N.dtype}"
            raise DataError(f"a document must be a list of integer ids, but one is {got} instead.")
        self.add_documents(tokens_N, np.array([len(tokens_N)]), text_bytes)

    def add_documents(
        self, tokens: Array, lengths: Array, text_bytes: int = 0, *, sequences: Array | None = None
    ) -> None:
        """Appends many sequences at once: their tokens concatenated, and the length of each.

        `sequences`: how many sequences each document has, by default one; an empty array if they belong to no documents
        (as in Pythia's preshuffled files).
        """
        if len(lengths) and lengths.max() > MAX_DOCUMENT_TOKENS:
            raise DataError(
                f"a document must have at most {MAX_DOCUMENT_TOKENS:,} tokens, but one has {lengths.max():,}."
            )
        if len(tokens):
            self._check_ids(tokens)
        sequences = np.ones(len(lengths), np.int32) if sequences is None else sequences
        self._document_sequences.frombytes(sequences.astype(np.int32).tobytes())
        self._lengths.frombytes(lengths.astype(np.int32).tobytes())
        self.text_bytes += text_bytes
        self.num_tokens += len(tokens)
        self._waiting.append(tokens.astype(self.dtype))
        self._waiting_tokens += len(tokens)
        if self._waiting_tokens >= FLUSH_TOKENS:
            self._flush()

    def finish(self) -> None:
        """Writes everything to disk under temporary names; after this only renaming is left to do."""
        if self._finished:
            return
        if not self.num_tokens:
            raise DataError(f"`{self._bin.path}` must get at least one token, but got none; nothing was written.")
        self._flush()
        idx_digest = self._write_index()
        *_, idx_bytes = self._layout().starts()
        info = DatasetInfo(
            tokens=self.num_tokens,
            documents=self.num_documents,
            text_bytes=self.text_bytes,
            vocab_size=self.vocab_size,
            tokenizer=self.tokenizer,
            token_counts=self._counts.tolist(),
            bin=FileFingerprint(self.num_tokens * self.dtype.itemsize, self._digest.hexdigest()),
            idx=FileFingerprint(idx_bytes, idx_digest),
            tokenizer_sha256=None if self._cut_by is None else self._cut_by.sha256,
            vocabulary_sha256=None if self._cut_by is None else self._cut_by.vocabulary,
            tokenizer_file=None if self._kept is None else self._kept.name,
            end_token=self.end_token,
        )
        self._info.write(info.dump())
        for staged in (self._bin, self._info, self._idx):
            staged.sync()
        self._finished = True

    def __enter__(self) -> IndexedDatasetWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._staged:
            if kind is None:
                self.finish()
                if self._kept is not None:
                    self._kept.write()
                self._idx.path.unlink(missing_ok=True)  # an old index must never stand beside new tokens
                self._bin.publish()
                self._info.publish()
                self._idx.publish()

    def _check_ids(self, tokens: Array) -> None:
        smallest, largest = int(tokens.min()), int(tokens.max())
        if smallest < 0 or largest >= self.vocab_size:
            wrong = smallest if smallest < 0 else largest
            raise DataError(
                f"token ids must lie below the vocabulary size {self.vocab_size}, but one near document "
                f"{self.num_documents} is {wrong} instead; use the tokenizer the ids were made with."
            )

    def _flush(self) -> None:
        if not self._waiting:
            return
        tokens = np.concatenate(self._waiting) if len(self._waiting) > 1 else self._waiting[0]
        self._waiting, self._waiting_tokens = [], 0
        for start in range(0, len(tokens), FLUSH_TOKENS):
            part = tokens[start : start + FLUSH_TOKENS]
            data = part.tobytes()
            self._bin.write(data)
            self._digest.update(data)
            self._counts += np.bincount(part, minlength=self.vocab_size)

    def _layout(self) -> IndexLayout:
        return IndexLayout(self.dtype, len(self._lengths), self.num_documents + 1)

    def _write_index(self) -> str:
        """Writes the `.idx` bytes; returns their checksum."""
        count = len(self._lengths)
        sizes = np.frombuffer(self._lengths, np.int32, count)
        offsets = np.zeros(count, np.int64)
        np.cumsum(sizes[:-1], out=offsets[1:], dtype=np.int64)
        offsets *= self.dtype.itemsize
        digest = hashlib.sha256()
        documents = np.zeros(self.num_documents + 1, np.int64)
        np.cumsum(np.frombuffer(self._document_sequences, np.int32), out=documents[1:])
        for part in (self._layout().pack(), sizes, offsets, documents):
            data = part if isinstance(part, bytes) else part.astype(part.dtype.newbyteorder("<")).tobytes()
            self._idx.write(data)
            digest.update(data)
        return digest.hexdigest()


class ByteProgress:
    """Follows a job that reads files; this one shows nothing."""

    def start(self, total_bytes: int | None) -> None:
        """The files' size on disk; None if it is not known."""

    def advance(self, read_bytes: int, text_bytes: int) -> None:
        """More bytes were read from disk, and came out as this many bytes of text."""


class ProgressBar(ByteProgress):
    """`with ProgressBar("Tokenizing") as bar`: on stderr, with megabytes of text, their rate, and the time left."""

    def __init__(self, title: str) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("{task.fields[text]:,.0f} MB, {task.fields[rate]:.1f} MB/s"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=Console(stderr=True), refresh_per_second=2)
        self._task: TaskID = self._progress.add_task(title, total=None, text=0.0, rate=0.0)
        self._text_bytes = 0

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def start(self, total_bytes: int | None) -> None:
        """Starts the clock."""
        self._progress.reset(self._task, total=total_bytes)

    def advance(self, read_bytes: int, text_bytes: int) -> None:
        """Moves the bar."""
        self._text_bytes += text_bytes
        megabytes = self._text_bytes / 1e6
        seconds = self._progress.tasks[0].elapsed or 0.0
        rate = megabytes / seconds if seconds else 0.0
        self._progress.update(self._task, advance=read_bytes, text=megabytes, rate=rate)
