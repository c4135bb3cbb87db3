"""Reads `PREFIX.bin` + `PREFIX.idx` in place: both stay on disk and are mapped into memory."""

from __future__ import annotations

import hashlib
import mmap
import struct
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megahead.corpus.dataset_info import DatasetInfo, TokenizerIdentity
from megahead.corpus.far_dataset import near_dataset
from megahead.corpus.index_layout import HEADER, IndexLayout
from megahead.errors import DataError
from megahead.wording import counted

Array = np.ndarray[Any, Any]


class IndexedDataset:
    """The sequences of an indexed dataset; `dataset[i]` is sequence i.

    Opening reads the header and the last entries only, whatever the number of sequences; `sizes`, `offsets` and
    `document_index` are copied (aligned) on first use. Arrays of tokens are read-only views of the file.
    DataError for files that are missing, cut short or inconsistent. A URL's files are fetched first, and `prefix` is
    where they are then.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = near_dataset(prefix)
        self.bin_path, self.idx_path, self.info_path = dataset_paths(self.prefix)
        self._index = _map(self.idx_path)
        self.layout = IndexLayout.parse(self.idx_path, self._index[: HEADER.size], len(self._index))
        self.dtype = self.layout.dtype
        self._map = self._map_tokens()
        self._tokens = np.frombuffer(self._map, self.dtype)
        self.random_access = False
        self._vocab_size: int | None = None
        self._check_documents()

    def __len__(self) -> int:
        return self.layout.num_sequences

    def __getitem__(self, i: int) -> Array:
        """Sequence i as a read-only view; negative i counts from the end."""
        position = i + len(self) if i < 0 else i
        if not 0 <= position < len(self):
            raise IndexError(f"sequence {i} of a dataset of {len(self)}")
        size, offset = self._entry(position)
        first = offset // self.dtype.itemsize
        if size < 0 or offset % self.dtype.itemsize or not 0 <= first <= self.num_tokens - size:
            raise DataError(
                f"`{self.idx_path}` must point into `{self.bin_path.name}`, but sequence {position} lies outside it; "
                "it was damaged, make the dataset again."
            )
        return self._checked(first, self._tokens[first : first + size])

    @property
    def num_tokens(self) -> int:
        """Tokens in the whole dataset."""
        return len(self._tokens)

    @property
    def num_documents(self) -> int:
        """Documents that the index lists; 0 in preshuffled files (Pythia's), whose index has one boundary (D = 1)."""
        return self.layout.num_boundaries - 1

    def document(self, i: int) -> Array:
        """Document i as a read-only view; neither its ids nor its boundaries are checked, and nothing else is read."""
        first, end = (self._first_token(self._boundary(i + k)) for k in (0, 1))
        return self._tokens[first:end]

    def read(self, first_token: int, count: int) -> Array:
        """The tokens [first_token, first_token + count) of the dataset, across sequence boundaries; a view."""
        if not 0 <= first_token <= first_token + count <= self.num_tokens:
            raise IndexError(f"tokens {first_token} to {first_token + count} of a dataset of {self.num_tokens}")
        return self._checked(first_token, self._tokens[first_token : first_token + count])

    def cut_by(self) -> TokenizerIdentity | None:
        """The tokenizer that made it, if `PREFIX.json` says."""
        return None if self.info is None else self.info.identity()

    def expect_ids_below(self, vocab_size: int) -> None:
        """From now on, reading an id that is not below `vocab_size` is a DataError."""
        self._vocab_size = vocab_size

    def _checked(self, first: int, tokens: Array) -> Array:
        limit = self._vocab_size
        if limit is not None and len(tokens) and not 0 <= tokens.min() <= tokens.max() < limit:
            at = int(np.argmax((tokens < 0) | (tokens >= limit)))
            raise DataError(
                f"`{self.bin_path}` must hold ids below {limit:,} only, but token {first + at:,} is {tokens[at]:,}; it "
                "is damaged, or of another tokenizer."
            )
        return tokens

    def expect_random_access(self) -> None:
        """Tells the system that rows will be read in random order, so that it does not read ahead.

        Measured on a sparse file of 15 GB: a cold row of 4 KB took 6 to 10 ms before, 13 to 25 us after.
        """
        self.random_access = True
        if isinstance(self._map, mmap.mmap):
            self._map.madvise(mmap.MADV_RANDOM)

    def will_read(self, first_token: int, count: int) -> None:
        """Starts reading these tokens from disk in the background; `read` them later."""
        if isinstance(self._map, mmap.mmap):
            start = first_token * self.dtype.itemsize // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_WILLNEED, start, (first_token + count) * self.dtype.itemsize - start)

    @cached_property
    def sizes(self) -> Array:
        """Tokens of each sequence, int32 [L]. The first use checks that they add up to the `.bin` file."""
        sizes = self._array("<i4", len(self), self.layout.sizes_at)
        total = int(sizes.sum(dtype=np.int64))
        if total != self.num_tokens or (sizes < 0).any():
            raise DataError(
                f"the sequence lengths in `{self.idx_path}` must add up to the {counted(self.num_tokens, 'token')} of "
                f"`{self.bin_path.name}`, but give {total:,} instead; make the dataset again."
            )
        return sizes

    @cached_property
    def offsets(self) -> Array:
        """Byte offset of each sequence in the `.bin` file, int64 [L]."""
        return self._array("<i8", len(self), self.layout.offsets_at)

    @cached_property
    def document_index(self) -> Array:
        """First sequence of each document, then L; int64 [D]."""
        return self._array("<i8", self.layout.num_boundaries, self.layout.documents_at)

    def document_boundaries(self) -> Array:
        """First token of each document, then the number of all tokens; int64 [D]. Reads the whole index."""
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.sizes, dtype=np.int64)])
        boundaries: Array = ends[self.document_index]
        return boundaries

    @cached_property
    def info(self) -> DatasetInfo | None:
        """The content of `PREFIX.json`; None if there is none, since another tool made the dataset. DataError when it
        describes other files."""
        if not self.info_path.exists():
            return None
        info = DatasetInfo.load(self.info_path)
        if (info.bin.bytes, info.idx.bytes) != (self.num_tokens * self.dtype.itemsize, len(self._index)):
            raise DataError(
                f"`{self.info_path}` must describe the `.bin` and `.idx` files beside it, but describes other sizes; "
                "remove it if they were replaced on purpose."
            )
        return info

    @property
    def fingerprint(self) -> str:
        """Identifies the text without reading it, by its length and a checksum: that of its tokens in `PREFIX.json`, or
        if there is none, that of its index."""
        noted = self.info.bin.sha256 if self.info else hashlib.sha256(self._index).hexdigest()
        return f"{self.num_tokens:,} tokens, sha256 {noted[:16]}"

    def _entry(self, i: int) -> tuple[int, int]:
        size: int = struct.unpack_from("<i", self._index, self.layout.sizes_at + 4 * i)[0]
        offset: int = struct.unpack_from("<q", self._index, self.layout.offsets_at + 8 * i)[0]
        return size, offset

    def _first_token(self, sequence: int) -> int:
        """Index of a sequence's first token in the dataset; for `len(self)` the number of all tokens."""
        return self.num_tokens if sequence == len(self) else self._entry(sequence)[1] // self.dtype.itemsize

    def _boundary(self, i: int) -> int:
        first_sequence: int = struct.unpack_from("<q", self._index, self.layout.documents_at + 8 * i)[0]
        return first_sequence

    def _array(self, dtype: str, count: int, offset: int) -> Array:
        array = np.frombuffer(self._index, dtype, count, offset).copy()  # unaligned in the file, aligned in the copy
        array.flags.writeable = False
        return array

    def _map_tokens(self) -> mmap.mmap | bytes:
        tokens = _map(self.bin_path)
        size, offset = self._entry(len(self) - 1) if len(self) else (0, 0)
        expected = offset + size * self.dtype.itemsize
        if len(tokens) != expected or expected % self.dtype.itemsize:
            raise DataError(
                f"`{self.bin_path}` must be {expected:,} bytes long by its index, but is {len(tokens):,} instead; "
                "it was cut short or belongs to another index."
            )
        return tokens

    def _check_documents(self) -> None:
        ends = [self._boundary(i) for i in (0, self.num_documents)[: self.layout.num_boundaries]]
        if not ends or ends[0] != 0 or (self.num_documents and ends[1] != len(self)):
            raise DataError(
                f"the documents in `{self.idx_path}` must begin at sequence 0 and end at {len(self)}, "
                f"but the boundaries are {ends} instead; it is damaged."
            )


def dataset_paths(prefix: str | Path) -> tuple[Path, Path, Path]:
    """`PREFIX.bin`, `PREFIX.idx` and `PREFIX.json`."""
    bin_path, idx_path, info_path = (Path(f"{prefix}{ending}") for ending in (".bin", ".idx", ".json"))
    return bin_path, idx_path, info_path


def _map(path: Path) -> mmap.mmap | bytes:
    """The file's bytes without reading them; an empty file cannot be mapped and gives b""."""
    try:
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                return b""
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        pieces = sorted(path.parent.glob(f"{path.stem}-*{path.suffix}"))
        if pieces and path.suffix == ".bin":
            raise DataError(
                f"`{path}` must be one file, but lies in {len(pieces)} pieces; join them: "
                f"cat {path.parent / path.stem}-*.bin > {path}"
            ) from None
        raise DataError(
            f"`{path}` must exist, but does not; give the prefix of a `.bin` and `.idx` pair, without ending."
        ) from None
    except OSError as error:
        raise DataError(f"`{path}` must be readable, but is not: {error.strerror}.") from error
