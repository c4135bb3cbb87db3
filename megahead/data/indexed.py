"""Indexed datasets (`PREFIX.bin`, `PREFIX.idx`, `PREFIX.json`), read in place, or fetched from a URL first."""

from __future__ import annotations

import hashlib
import mmap
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from megahead.config.data import DATASET_FORMAT
from megahead.errors import DataError
from megahead.files import write_atomically
from megahead.remote_files import ExpectedFile, RemoteError, Store, cache_folder, fetch_into, is_remote, split_url
from megahead.wording import pluralize

# The layout of an `.idx` file (Megatron "MMIDIDX", version 1).
#
#     0  magic (9)    9  version u64    17  dtype code u8    18  L u64    26  D u64
#     34            sizes       L x i32   tokens of each sequence
#     34 +  4 L     offsets     L x i64   byte offset of each sequence in `.bin`
#     34 + 12 L     documents   D x i64   where documents begin, as indices into the sequences; starts at 0, ends at L
#     34 + 12 L + 8 D   modes   L x i8    optional (multimodal data), ignored here
#
# All integers are little-endian. The header's 34 bytes leave every array unaligned.

MAGIC = b"MMIDIDX\0\0"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype] = {
    code: np.dtype(name) for code, name in {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}.items()
}
UINT16_VOCABULARY_LIMIT = 65_500
BLOCK_TOKENS = 1 << 22
MISSING_DATASET = "`{}` must exist, but does not; give the prefix of a `.bin` and `.idx` pair, without ending."
Array = np.ndarray[Any, Any]


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 for vocabularies below 65,500 ids, else int32."""
    return np.dtype("<u2") if vocab_size < UINT16_VOCABULARY_LIMIT else np.dtype("<i4")


@dataclass(frozen=True)
class IndexLayout:
    """The header of an `.idx` file, and where its arrays begin."""

    dtype: np.dtype
    num_sequences: int
    num_boundaries: int
    """D = documents + 1; 1 in Pythia's preshuffled files, which list no documents."""

    def array_offsets(self) -> tuple[int, int, int, int]:
        """Byte offsets in the file: of the arrays sizes, offsets and documents, and of the end of documents."""
        offsets = HEADER.size + 4 * self.num_sequences
        documents = offsets + 8 * self.num_sequences
        return HEADER.size, offsets, documents, documents + 8 * self.num_boundaries

    def pack(self) -> bytes:
        """The 34 header bytes."""
        code = next(code for code, dtype in DTYPES.items() if dtype == self.dtype)
        return HEADER.pack(MAGIC, VERSION, code, self.num_sequences, self.num_boundaries)

    @staticmethod
    def parse(path: Path, index: mmap.mmap | bytes) -> IndexLayout:
        """Reads the header of `index`, the bytes of `path`. DataError if it is no index or is truncated."""
        header, file_bytes = index[: HEADER.size], len(index)
        if header[: len(MAGIC)] != MAGIC:
            raise DataError(
                f"`{path}` must begin with the magic of an indexed dataset ({MAGIC!r}), "
                f"but begins with {header[: len(MAGIC)]!r} instead; make it with `megahead preprocess`."
            )
        if len(header) < HEADER.size:
            raise DataError(f"`{path}` must have a header of {HEADER.size} bytes, but has {len(header)} instead.")
        _, version, code, sequences, boundaries = HEADER.unpack(header)
        if version != VERSION:
            raise DataError(f"`{path}` must be of version {VERSION}, but is of version {version} instead.")
        if code not in DTYPES:
            reason = " (6 and 7 mean different types in GPT-NeoX and Megatron)" if code in (6, 7) else ""
            raise DataError(f"`{path}` must have a dtype code of {sorted(DTYPES)}, but has {code} instead{reason}.")
        layout = IndexLayout(DTYPES[code], sequences, boundaries)
        *_, end = layout.array_offsets()
        if file_bytes not in (end, end + sequences):
            raise DataError(
                f"`{path}` must be {end:,} bytes long for {pluralize(sequences, 'sequence')} and "
                f"{boundaries:,} document boundaries, but is {file_bytes:,} instead; it was cut short or is damaged."
            )
        return layout


# `PREFIX.json`: counts, origin and checksums of a dataset, which can be read without reading its tokens.


@dataclass(frozen=True)
class TokenizerIdentity:
    """Identifies the tokenizer of a dataset."""

    name: str
    """Name of the tokenizer's file."""

    sha256: str
    """SHA-256 of that file."""

    vocabulary: str
    """SHA-256 of all that determines the ids of a text; saving the file again in another form does not change it."""

    def __str__(self) -> str:
        return f"{self.name} ({self.sha256[:8]})"


def require_same_tokenizer(identities: Mapping[str, TokenizerIdentity | None]) -> None:
    """DataError if two known identities differ (None: unknown). The keys name the owners in the error."""
    known = [(owner, identity) for owner, identity in identities.items() if identity is not None]
    for owner, identity in known[1:]:
        first_owner, first_identity = known[0]
        if identity.vocabulary != first_identity.vocabulary:
            raise DataError(
                f"{first_owner} and {owner} must have one tokenizer, but they have {first_identity} and {identity} "
                "instead; name the tokenizer that the text was preprocessed with, or preprocess it again."
            )


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """Counts, origin and checksums of one `.bin` / `.idx` pair."""

    tokens: int
    """All tokens, end tokens included."""

    documents: int
    """Documents, each closed by an end token."""

    text_bytes: int
    """UTF-8 bytes of the text (bits per byte = nats / ln 2 / text_bytes); 0 when unknown."""

    vocab_size: int
    """All ids are below this."""

    tokenizer: str | None
    """Name of the tokenizer's file."""

    token_counts: list[int]
    """[vocab_size]: how often each id occurs."""

    bin: ExpectedFile
    idx: ExpectedFile

    tokenizer_sha256: str | None = None
    """SHA-256 of the tokenizer's file; None in datasets of earlier versions, or if none was given."""

    vocabulary_sha256: str | None = None
    """`TokenizerIdentity.vocabulary`."""

    tokenizer_file: str | None = None
    """Name of the tokenizer's file beside the dataset, which other datasets of its folder may share."""

    end_token: int | None = None
    """Id that closes each document."""

    source: str | None = None
    """Names of the files or the folder with the text, without their paths; None in datasets of earlier versions."""

    def tokenizer_identity(self) -> TokenizerIdentity | None:
        """The identity of the tokenizer; None if it is unknown."""
        values = self.tokenizer, self.tokenizer_sha256, self.vocabulary_sha256
        return None if None in values else TokenizerIdentity(*map(str, values))

    def fingerprint(self) -> str:
        """The number of tokens and a checksum of them."""
        return f"{self.tokens:,} tokens, sha256 {self.bin.sha256:.16}"

    def dump(self) -> bytes:
        """The JSON text."""
        return orjson.dumps({"format": DATASET_FORMAT, **vars(self)})  # asdict would copy every count

    @staticmethod
    def load(path: Path) -> DatasetInfo:
        """Reads `path`; DataError if it is not a dataset description."""
        try:
            fields = orjson.loads(path.read_bytes())
            if fields.pop("format") != DATASET_FORMAT:
                raise ValueError("another format")
            info = DatasetInfo(**fields | {name: ExpectedFile(**fields[name]) for name in ("bin", "idx")})
            sizes = [info.tokens, info.documents, info.text_bytes, info.vocab_size, info.bin.bytes, info.idx.bytes]
            has_checksums = isinstance(info.bin.sha256, str) and isinstance(info.idx.sha256, str)
            if not has_checksums or not all(isinstance(size, int) and size >= 0 for size in sizes):
                raise ValueError("a number or a checksum is invalid")
            counts_V = np.asarray(info.token_counts)
            if counts_V.dtype.kind not in "iu" or counts_V.shape != (info.vocab_size,) or (counts_V < 0).any():
                raise ValueError("token_counts are not counts of vocab_size ids")
            return info
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"`{path}` must be a dataset description ({DATASET_FORMAT}), but is not ({error}); remove it or "
                "make the dataset again."
            ) from error


def dataset_paths(prefix: str | Path) -> tuple[Path, Path, Path]:
    """`PREFIX.bin`, `PREFIX.idx` and `PREFIX.json`."""
    bin_path, idx_path, info_path = (Path(f"{prefix}{ending}") for ending in (".bin", ".idx", ".json"))
    return bin_path, idx_path, info_path


# Datasets at a URL: their files are downloaded to this machine, and then mapped like any other.


def fetch_dataset(prefix: str) -> Iterator[str]:
    """Downloads the missing files of a dataset; yields the local prefix at least once a second, and at the end.

    Verifies sizes and checksums against `PREFIX.json`; without that file, only sizes, against the store. DataError for
    a dataset that does not exist, RemoteError for a store that cannot be read, DamagedError for files that do not
    match.
    """
    local_prefix = prefix
    if is_remote(prefix):
        folder, store, files = _remote_files(prefix)
        local_prefix = str(folder / split_url(prefix)[1])
        for _ in fetch_into(folder, store, files):
            yield local_prefix
    yield local_prefix


def _remote_files(prefix: str) -> tuple[Path, Store, dict[str, ExpectedFile]]:
    """(local folder, store, expected size and checksum of each file) of a dataset at a URL."""
    url, name = split_url(prefix)
    store = Store(url)
    bin_name, idx_name, info_name = (path.name for path in dataset_paths(name))
    try:
        description = store.read_if_exists(info_name)
        if description is None:
            folder = cache_folder(prefix, store.version(bin_name), store.version(idx_name))
            return folder, store, {file: ExpectedFile(store.size(file)) for file in (bin_name, idx_name)}
    except FileNotFoundError:
        raise DataError(MISSING_DATASET.format(prefix)) from None
    folder = cache_folder(prefix, description.hex())
    if not (folder / info_name).exists():
        write_atomically(folder / info_name, description)
    info = DatasetInfo.load(folder / info_name)
    files = {bin_name: info.bin, idx_name: info.idx}
    if info.tokenizer_file is not None:
        tokenizer = Path(info.tokenizer_file).name
        with suppress(FileNotFoundError, RemoteError):  # it may have been left out of an upload
            files[tokenizer] = ExpectedFile(store.size(tokenizer))
    return folder, store, files


class IndexedDataset:
    """The sequences of an indexed dataset, mapped into memory; `dataset[i]` is sequence i.

    Opening reads the header and the last entries only, whatever the number of sequences; `sizes`, `offsets` and
    `document_index` are copied (aligned) on first use. Arrays of tokens are read-only views of the file.
    DataError for files that are missing, truncated or inconsistent. A dataset at a URL is downloaded first;
    `prefix` is then that of the local files.
    """

    def __init__(self, prefix: str | Path) -> None:
        *_, local_prefix = fetch_dataset(str(prefix))
        self.prefix = Path(local_prefix)
        self.bin_path, self.idx_path, self.info_path = dataset_paths(local_prefix)
        self._index = _map_file(self.idx_path)
        self.layout = IndexLayout.parse(self.idx_path, self._index)
        self.dtype = self.layout.dtype
        sizes_start, offsets_start, documents_start, _ = self.layout.array_offsets()
        self._sizes_L = np.frombuffer(self._index, "<i4", len(self), sizes_start)  # in the file, unaligned
        self._offsets_L = np.frombuffer(self._index, "<i8", len(self), offsets_start)
        self._documents_D = np.frombuffer(self._index, "<i8", self.layout.num_boundaries, documents_start)
        self._bin = _map_file(self.bin_path)
        expected = int(self._offsets_L[-1]) + int(self._sizes_L[-1]) * self.dtype.itemsize if len(self) else 0
        if len(self._bin) != expected or expected % self.dtype.itemsize:
            raise DataError(
                f"`{self.bin_path}` must be {expected:,} bytes long by its index, but is {len(self._bin):,} instead; "
                "it was cut short or belongs to another index."
            )
        self._tokens = np.frombuffer(self._bin, self.dtype)
        self.expects_random_access = False
        self._vocab_size: int | None = None
        outermost = self._documents_D[[0, -1][: self.layout.num_boundaries]].tolist()
        if not outermost or outermost[0] != 0 or (self.num_documents and outermost[1] != len(self)):
            raise DataError(
                f"the documents in `{self.idx_path}` must begin at sequence 0 and end at {len(self)}, "
                f"but the boundaries are {outermost} instead; it is damaged."
            )

    def __len__(self) -> int:
        return self.layout.num_sequences

    def __getitem__(self, i: int) -> Array:
        """Sequence i as a read-only view; negative i counts from the end."""
        position = range(len(self))[i]
        size, offset = int(self._sizes_L[position]), int(self._offsets_L[position])
        first = offset // self.dtype.itemsize
        if size < 0 or offset % self.dtype.itemsize or not 0 <= first <= self.num_tokens - size:
            raise DataError(
                f"`{self.idx_path}` must point into `{self.bin_path.name}`, but sequence {position} lies outside it; "
                "it was damaged, make the dataset again."
            )
        return self._check_ids(first, self._tokens[first : first + size])

    @property
    def num_tokens(self) -> int:
        """Tokens in the whole dataset."""
        return len(self._tokens)

    @property
    def num_documents(self) -> int:
        """Documents that the index lists; 0 in preshuffled files (Pythia's), whose index has one boundary (D = 1)."""
        return self.layout.num_boundaries - 1

    def document(self, i: int) -> Array:
        """Document i as a read-only view. Checks neither its ids nor its boundaries, and reads nothing else."""
        sequences = self._documents_D[i : i + 2].tolist()
        start, end = (self._offsets_L[number] if number < len(self) else len(self._bin) for number in sequences)
        return self._tokens[start // self.dtype.itemsize : end // self.dtype.itemsize]

    def read(self, first_token: int, count: int) -> Array:
        """The tokens [first_token, first_token + count) of the dataset, across sequence boundaries; a view."""
        if not 0 <= first_token <= first_token + count <= self.num_tokens:
            raise IndexError(f"tokens {first_token} to {first_token + count} of a dataset of {self.num_tokens}")
        return self._check_ids(first_token, self._tokens[first_token : first_token + count])

    def blocks(self, limit: int | None = None) -> Iterator[Array]:
        """The tokens, or the first `limit` of them, in views of up to about four million."""
        end = self.num_tokens if limit is None else min(limit, self.num_tokens)
        for first in range(0, end, BLOCK_TOKENS):
            yield self.read(first, min(BLOCK_TOKENS, end - first))

    def tokenizer_identity(self) -> TokenizerIdentity | None:
        """The identity of its tokenizer; None if `PREFIX.json` does not have it."""
        return None if self.info is None else self.info.tokenizer_identity()

    def tokenizer_path(self) -> Path | None:
        """The tokenizer's file beside the dataset; None if there is none."""
        name = None if self.info is None else self.info.tokenizer_file
        path = None if name is None else self.info_path.with_name(name)
        return path if path is not None and path.is_file() else None

    def expect_ids_below(self, vocab_size: int) -> None:
        """From now on, reading an id that is not below `vocab_size` is a DataError."""
        self._vocab_size = vocab_size

    def _check_ids(self, first: int, tokens: Array) -> Array:
        size = self._vocab_size
        if size is not None and len(tokens) and not 0 <= tokens.min() <= tokens.max() < size:
            i = int(np.argmax((tokens < 0) | (tokens >= size)))
            raise DataError(
                f"`{self.bin_path}` must hold ids below {size:,} only, but token {first + i:,} is {tokens[i]:,}; it "
                "is damaged, or of another tokenizer."
            )
        return tokens

    def expect_random_access(self) -> None:
        """Tells the system that rows will be read in random order, so that it does not read ahead.

        Measured on a sparse file of 15 GB: a cold row of 4 KB took 6 to 10 ms before, 13 to 25 us after.
        """
        self.expects_random_access = True
        if isinstance(self._bin, mmap.mmap):
            self._bin.madvise(mmap.MADV_RANDOM)

    def prefetch(self, first_token: int, count: int) -> None:
        """Starts reading these tokens from disk in the background; `read` them later."""
        if isinstance(self._bin, mmap.mmap):
            start = first_token * self.dtype.itemsize // mmap.PAGESIZE * mmap.PAGESIZE
            self._bin.madvise(mmap.MADV_WILLNEED, start, (first_token + count) * self.dtype.itemsize - start)

    @cached_property
    def sizes(self) -> Array:
        """Tokens of each sequence, int32 [L]. The first use checks that they add up to the `.bin` file."""
        sizes = _aligned_copy(self._sizes_L)
        total = int(sizes.sum(dtype=np.int64))
        if total != self.num_tokens or (sizes < 0).any():
            raise DataError(
                f"the sequence lengths in `{self.idx_path}` must add up to the {pluralize(self.num_tokens, 'token')} "
                f"of `{self.bin_path.name}`, but give {total:,} instead; make the dataset again."
            )
        return sizes

    @cached_property
    def offsets(self) -> Array:
        """Byte offset of each sequence in the `.bin` file, int64 [L]."""
        return _aligned_copy(self._offsets_L)

    @cached_property
    def document_index(self) -> Array:
        """First sequence of each document, then L; int64 [D]."""
        return _aligned_copy(self._documents_D)

    def sequence_boundaries(self) -> Array:
        """First token of each sequence, then the number of all tokens; int64 [L + 1]. Reads the whole index."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.sizes, dtype=np.int64)])

    def document_boundaries(self) -> Array:
        """First token of each document, then the number of all tokens; int64 [D]. Reads the whole index."""
        boundaries: Array = self.sequence_boundaries()[self.document_index]
        return boundaries

    @cached_property
    def info(self) -> DatasetInfo | None:
        """The content of `PREFIX.json`; None if another tool made the dataset without one. DataError if it describes
        other files."""
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
        """The number of tokens and a checksum: of the tokens if `PREFIX.json` has it, else of the index. Does not read
        the tokens."""
        if self.info is not None:
            return self.info.fingerprint()
        return f"{self.num_tokens:,} tokens, sha256 {hashlib.sha256(self._index).hexdigest()[:16]}"


def _aligned_copy(array: Array) -> Array:
    copy = array.copy()
    copy.flags.writeable = False
    return copy


def _map_file(path: Path) -> mmap.mmap | bytes:
    """The file's bytes without reading them; an empty file cannot be mapped and gives b""."""
    try:
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                return b""
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        others = path.parent.glob(f"{path.stem}-*{path.suffix}")
        pieces = [other for other in others if not other.with_suffix(".idx").exists()]
        if pieces and path.suffix == ".bin":
            raise DataError(
                f"`{path}` must be one file, but lies in {len(pieces)} pieces; join them: "
                f"cat {path.parent / path.stem}-*.bin > {path}"
            ) from None
        raise DataError(MISSING_DATASET.format(path)) from None
    except OSError as error:
        raise DataError(f"`{path}` must be readable, but is not: {error.strerror}.") from error
