"""Writes indexed datasets, and shows the progress of jobs that read files."""

from __future__ import annotations

import hashlib
from array import array
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from megahead.data.indexed import Array, DatasetInfo, IndexLayout, TokenizerIdentity, dataset_paths, token_dtype
from megahead.data.tokenizer import is_sentencepiece
from megahead.errors import ArgumentError, DataError
from megahead.files import AtomicFile, write_atomically
from megahead.remote_files import ExpectedFile, is_remote

FLUSH_TOKENS = 1 << 20
MAX_DOCUMENT_TOKENS = 2**31 - 1


def _tokenizer_to_save(source: Path, folder: Path) -> tuple[Path, bytes]:
    """(path, content) of the tokenizer's file in a folder of datasets: the source itself if it is in the folder, else a
    copy named by its SHA-256, which the folder's datasets share."""
    content, ending = source.read_bytes(), ".model" if is_sentencepiece(source) else ".json"
    in_folder = source.parent.resolve() == folder.resolve()
    name = source.name if in_folder else f"tokenizer-{hashlib.sha256(content).hexdigest()[:8]}{ending}"
    return folder / name, content


class IndexedDatasetWriter:
    """`with IndexedDatasetWriter(prefix, vocab_size=V) as w: w.add_document(tokens)`: the files appear together at the
    end or not at all.

    Memory: about a million tokens, and 4 bytes per sequence and per document. An existing dataset of this name is
    replaced on a clean exit and untouched after an error. DataError on exit if no token was added.
    """

    def __init__(
        self,
        prefix: str | Path,
        *,
        vocab_size: int,
        tokenizer: str | TokenizerIdentity | None = None,
        tokenizer_file: Path | None = None,
        end_token: int | None = None,
        source: str | None = None,
    ) -> None:
        """`tokenizer`: the identity of the text's tokenizer, or at least the name of its file. `tokenizer_file`: that
        file, which is copied beside the dataset. `end_token`: the id that closes each document. `source`: names of the
        files with the text."""
        if is_remote(str(prefix)):
            raise DataError(
                f"a dataset must be written to a disk, but {prefix} is in a store; copy its files there afterwards."
            )
        if str(prefix).rpartition("/")[2] in ("", ".", ".."):
            rule, hint = "end in the name of the dataset", "name one in that folder, like data/text"
            raise ArgumentError("prefix", rule, got=repr(str(prefix)), hint=hint)
        if not isinstance(vocab_size, int) or vocab_size < 1:
            raise ArgumentError("vocab_size", "be a whole number above 0", got=vocab_size)
        self.vocab_size = vocab_size
        folder, identity = Path(prefix).parent, tokenizer if isinstance(tokenizer, TokenizerIdentity) else None
        self._tokenizer_copy = None if tokenizer_file is None else _tokenizer_to_save(tokenizer_file, folder)
        self._describe = partial(
            DatasetInfo,
            vocab_size=vocab_size,
            tokenizer=tokenizer.name if isinstance(tokenizer, TokenizerIdentity) else tokenizer,
            tokenizer_sha256=None if identity is None else identity.sha256,
            vocabulary_sha256=None if identity is None else identity.vocabulary,
            tokenizer_file=None if self._tokenizer_copy is None else self._tokenizer_copy[0].name,
            end_token=end_token,
            source=source,
        )
        self.dtype = token_dtype(vocab_size)
        self.num_tokens = self.text_bytes = 0
        self._lengths = array("i")
        self._sequences_per_document = array("i")
        self._buffer: list[Array] = []
        self._buffered_tokens = 0
        self._counts = np.zeros(vocab_size, np.int64)
        self._digest = hashlib.sha256()
        self._finished = False
        with ExitStack() as open_files:
            files = []
            for path in dataset_paths(prefix):
                files.append(AtomicFile(path))
                open_files.callback(files[-1].discard)
            self._open_files = open_files.pop_all()  # discarded on exit, not here
        self._bin, self._idx, self._info = files

    @property
    def num_documents(self) -> int:
        """Documents added so far."""
        return len(self._sequences_per_document)

    def count(self, id_: int) -> int:
        """How often an id was added; valid after `finish`."""
        return int(self._counts[id_])

    def add_document(self, tokens: ArrayLike, text_bytes: int = 0) -> None:
        """Appends one document [tokens] made of `text_bytes` bytes of text. DataError for an id outside the vocabulary,
        or tokens that are no list of integers.

        Adds no end token: if wanted, it must be the last of the tokens.
        """
        tokens_N = np.asarray(tokens)
        if tokens_N.ndim != 1 or (tokens_N.size and tokens_N.dtype.kind not in "iu"):
            got = f"{list(tokens_N.shape)} of {tokens_N.dtype}"
            raise DataError(f"a document must be a list of integer ids, but one is {got} instead.")
        self.add_documents(tokens_N, np.array([len(tokens_N)]), text_bytes)

    def add_documents(
        self, tokens: Array, lengths: Array, text_bytes: int = 0, *, sequences: Array | None = None
    ) -> None:
        """Appends many sequences at once. `tokens`: of all, concatenated; `lengths`: of each.

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
        self._sequences_per_document.frombytes(sequences.astype(np.int32).tobytes())
        self._lengths.frombytes(lengths.astype(np.int32).tobytes())
        self.text_bytes += text_bytes
        self.num_tokens += len(tokens)
        self._buffer.append(tokens.astype(self.dtype))
        self._buffered_tokens += len(tokens)
        if self._buffered_tokens >= FLUSH_TOKENS:
            self._flush()

    def finish(self) -> None:
        """Writes everything to disk under temporary names, which the exit then renames."""
        if self._finished:
            return
        if not self.num_tokens:
            raise DataError(f"`{self._bin.path}` must get at least one token, but got none; nothing was written.")
        self._flush()
        info = self._describe(
            tokens=self.num_tokens,
            documents=self.num_documents,
            text_bytes=self.text_bytes,
            token_counts=self._counts.tolist(),
            bin=ExpectedFile(self.num_tokens * self.dtype.itemsize, self._digest.hexdigest()),
            idx=self._write_index(),
        )
        self._info.write(info.dump())
        for file in (self._bin, self._info, self._idx):
            file.sync()
        self._finished = True

    def __enter__(self) -> IndexedDatasetWriter:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        with self._open_files:
            if exc_type is None:
                self.finish()
                if self._tokenizer_copy is not None and not self._tokenizer_copy[0].exists():
                    write_atomically(*self._tokenizer_copy)
                self._idx.path.unlink(missing_ok=True)  # an old index must never be beside new tokens
                for file in (self._bin, self._info, self._idx):
                    file.publish()

    def _check_ids(self, tokens: Array) -> None:
        smallest, largest = int(tokens.min()), int(tokens.max())
        if smallest < 0 or largest >= self.vocab_size:
            invalid_id = smallest if smallest < 0 else largest
            raise DataError(
                f"token ids must lie below the vocabulary size {self.vocab_size}, but one near document "
                f"{self.num_documents} is {invalid_id} instead; use the tokenizer the ids were made with."
            )

    def _flush(self) -> None:
        if not self._buffer:
            return
        tokens = np.concatenate(self._buffer) if len(self._buffer) > 1 else self._buffer[0]
        self._buffer, self._buffered_tokens = [], 0
        for start in range(0, len(tokens), FLUSH_TOKENS):
            part = tokens[start : start + FLUSH_TOKENS]
            data = part.tobytes()
            self._bin.write(data)
            self._digest.update(data)
            self._counts += np.bincount(part, minlength=self.vocab_size)

    def _write_index(self) -> ExpectedFile:
        sizes, documents = (np.frombuffer(part, np.int32) for part in (self._lengths, self._sequences_per_document))
        offsets = (np.cumsum(sizes, dtype=np.int64) - sizes) * self.dtype.itemsize
        boundaries = np.append(0, np.cumsum(documents, dtype=np.int64))
        header = np.frombuffer(IndexLayout(self.dtype, len(sizes), len(boundaries)).pack(), np.uint8)
        digest, num_bytes = hashlib.sha256(), 0
        for part in (header, sizes, offsets, boundaries):
            data = part.astype(part.dtype.newbyteorder("<")).tobytes()
            self._idx.write(data)
            digest.update(data)
            num_bytes += len(data)
        return ExpectedFile(num_bytes, digest.hexdigest())


class ProgressBar:
    """`with ProgressBar("Tokenizing") as bar`: shows megabytes of text, their rate, and the time left of a job that
    reads files, on stderr. Without a title it shows nothing."""

    def __init__(self, title: str = "") -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("{task.fields[text]:,.0f} MB, {task.fields[rate]:.1f} MB/s"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=Console(stderr=True), refresh_per_second=2, disable=not title)
        self._task: TaskID = self._progress.add_task(title, total=None, text=0.0, rate=0.0)
        self._text_bytes = 0

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def start(self, total_bytes: int | None) -> None:
        """Begins with the size of all files on disk; None if it is unknown."""
        self._progress.reset(self._task, total=total_bytes)

    def advance(self, read_bytes: int, text_bytes: int) -> None:
        """Adds a part's bytes on disk and its bytes of text."""
        self._text_bytes += text_bytes
        megabytes = self._text_bytes / 1e6
        seconds = self._progress.tasks[0].elapsed or 0.0
        rate = megabytes / seconds if seconds else 0.0
        self._progress.update(self._task, advance=read_bytes, text=megabytes, rate=rate)


NO_PROGRESS = ProgressBar()
