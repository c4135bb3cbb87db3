"""Indexed datasets (`PREFIX.bin`, `PREFIX.idx`, `PREFIX.json`), read in place, or fetched from a URL first."""

from __future__ import annotations

import hashlib
import mmap
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from megahead.config.dataset_defaults import FORMAT
from megahead.errors import DataError
from megahead.files import write_atomically
from megahead.remote_files import ExpectedFile, Store, cache_folder, fetch_into, is_remote, split_url
from megahead.wording import pluralize

# The bytes of an `.idx` file (Megatron "MMIDIDX", version 1): where each array is, and what must hold.
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
LARGEST_UINT16_VOCABULARY = 65_500
MISSING = "`{}` must exist, but does not; give the prefix of a `.bin` and `.idx` pair, without ending."
Array = np.ndarray[Any, Any]


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 for vocabularies below 65,500 ids, else int32."""
    return np.dtype("<u2") if vocab_size < LARGEST_UINT16_VOCABULARY else np.dtype("<i4")


@dataclass(frozen=True)
class IndexLayout:
    """The header of an `.idx` file, and where its arrays begin."""

    dtype: np.dtype
    num_sequences: int
    num_boundaries: int
    """D = documents + 1; 1 in Pythia's preshuffled files, which list no documents."""

    def starts(self) -> tuple[int, int, int, int]:
        """Bytes from the file's beginning to its sizes, offsets and documents, and to their end."""
        offsets = HEADER.size + 4 * self.num_sequences
        documents = offsets + 8 * self.num_sequences
        return HEADER.size, offsets, documents, documents + 8 * self.num_boundaries

    def pack(self) -> bytes:
        """The 34 header bytes."""
        code = next(code for code, dtype in DTYPES.items() if dtype == self.dtype)
        return HEADER.pack(MAGIC, VERSION, code, self.num_sequences, self.num_boundaries)

    @staticmethod
    def parse(path: Path, header: bytes, file_bytes: int) -> IndexLayout:
        """Reads the header of `path`, a file of `file_bytes` bytes. DataError if it is no index, or was cut short."""
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
        *_, end = layout.starts()
        if file_bytes not in (end, end + sequences):
            raise DataError(
                f"`{path}` must be {end:,} bytes long for {pluralize(sequences, 'sequence')} and "
                f"{boundaries:,} document boundaries, but is {file_bytes:,} instead; it was cut short or is damaged."
            )
        return layout


# `PREFIX.json`: counts, origin and checksums of a dataset, which can be read without reading its tokens.


@dataclass(frozen=True)
class FileFingerprint:
    """Size and checksum of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class TokenizerIdentity:
    """Which tokenizer cut a text."""

    name: str
    """Of its file."""

    sha256: str
    """Of its file."""

    vocabulary: str
    """SHA-256 of all that decides which ids a text becomes: equal for a file that was saved again in another form."""

    def __str__(self) -> str:
        return f"{self.name} ({self.sha256[:8]})"


def require_same_tokenizer(cut_by: Mapping[str, TokenizerIdentity | None]) -> None:
    """DataError unless all of these, by what they are, have one tokenizer; those of which none is known pass."""
    known = [(what, identity) for what, identity in cut_by.items() if identity is not None]
    for what, identity in known[1:]:
        first, its = known[0]
        if identity.vocabulary != its.vocabulary:
            raise DataError(
                f"{first} and {what} must have one tokenizer, but they have {its} and {identity} instead; name the "
                "tokenizer that the text was cut with, or cut it again."
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
    """Ids are below this."""

    tokenizer: str | None
    """Name of the tokenizer's file."""

    token_counts: list[int]
    """[vocab_size]: how often each id occurs."""

    bin: FileFingerprint
    idx: FileFingerprint

    tokenizer_sha256: str | None = None
    """Of the tokenizer's file; None in datasets of earlier versions, and where nobody named one."""

    vocabulary_sha256: str | None = None
    """`TokenizerIdentity.vocabulary`."""

    tokenizer_file: str | None = None
    """Name of the tokenizer's file beside the dataset, which other datasets of its folder may share."""

    end_token: int | None = None
    """Id that closes each document."""

    def tokenizer_identity(self) -> TokenizerIdentity | None:
        """Of the tokenizer, if it is known."""
        known = self.tokenizer, self.tokenizer_sha256, self.vocabulary_sha256
        return None if None in known else TokenizerIdentity(*map(str, known))

    def dump(self) -> bytes:
        """The JSON text."""
        return orjson.dumps({"format": FORMAT, **vars(self)})  # asdict would copy every count

    @staticmethod
    def load(path: Path) -> DatasetInfo:
        """Reads `path`; DataError when it is not such a file."""
        try:
            fields = orjson.loads(path.read_bytes())
            if fields.pop("format") != FORMAT:
                raise ValueError("another format")
            info = DatasetInfo(**fields | {name: FileFingerprint(**fields[name]) for name in ("bin", "idx")})
            numbers = [info.tokens, info.documents, info.text_bytes, info.vocab_size, info.bin.bytes, info.idx.bytes]
            checksums = isinstance(info.bin.sha256, str) and isinstance(info.idx.sha256, str)
            if not checksums or not all(isinstance(number, int) and number >= 0 for number in numbers):
                raise ValueError("a number or a checksum is none")
            counts_V = np.asarray(info.token_counts)
            if counts_V.dtype.kind not in "iu" or counts_V.shape != (info.vocab_size,) or (counts_V < 0).any():
                raise ValueError("token_counts are not counts of vocab_size ids")
            return info
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"`{path}` must be a dataset description ({FORMAT}), but is not ({error}); remove it or make the "
                "dataset again."
            ) from error


def verify_file(path: Path, fingerprint: FileFingerprint, advance: Callable[[int], None] = lambda read: None) -> None:
    """Reads all of `path` and compares its checksum; DataError when it differs. `advance` is called with the number of
    bytes of each block read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
            advance(len(block))
    if digest.hexdigest() != fingerprint.sha256:
        raise DataError(
            f"`{path}` must have the SHA-256 {fingerprint.sha256} recorded when it was made, but has "
            f"{digest.hexdigest()} instead; it was damaged or changed since."
        )


def dataset_paths(prefix: str | Path) -> tuple[Path, Path, Path]:
    """`PREFIX.bin`, `PREFIX.idx` and `PREFIX.json`."""
    bin_path, idx_path, info_path = (Path(f"{prefix}{ending}") for ending in (".bin", ".idx", ".json"))
    return bin_path, idx_path, info_path


# Datasets named by a URL: their files are fetched to this machine, and then mapped like any other.


def fetch_dataset(prefix: str) -> Iterator[str]:
    """Fetches what is not here yet; meanwhile yields the prefix here at least once a second, and again at the end.

    Checked by the lengths and checksums in `PREFIX.json`; without that file by the lengths in the store alone.
    DataError for a dataset that is not there, RemoteError for a store that cannot be read, DamagedError for files that
    do not agree.
    """
    here = prefix
    if is_remote(prefix):
        folder, store, files = _remote_files(prefix)
        here = str(folder / split_url(prefix)[1])
        for _ in fetch_into(folder, store, files):
            yield here
    yield here


def _remote_files(prefix: str) -> tuple[Path, Store, dict[str, ExpectedFile]]:
    """Where a dataset's files belong here, the store that has them, and what they must be."""
    url, name = split_url(prefix)
    store = Store(url)
    tokens, index, info = (path.name for path in dataset_paths(name))
    try:
        described = store.read_if_exists(info)
        if described is None:
            folder = cache_folder(prefix, store.version(tokens), store.version(index))
            return folder, store, {each: ExpectedFile(store.size(each)) for each in (tokens, index)}
    except FileNotFoundError:
        raise DataError(MISSING.format(prefix)) from None
    folder = cache_folder(prefix, described.hex())
    if not (folder / info).exists():
        write_atomically(folder / info, described)
    known = DatasetInfo.load(folder / info)
    pairs = (tokens, known.bin), (index, known.idx)
    return folder, store, {each: ExpectedFile(recorded.bytes, recorded.sha256) for each, recorded in pairs}


# Reads `PREFIX.bin` + `PREFIX.idx` in place: both stay on disk and are mapped into memory.


class IndexedDataset:
    """The sequences of an indexed dataset; `dataset[i]` is sequence i.

    Opening reads the header and the last entries only, whatever the number of sequences; `sizes`, `offsets` and
    `document_index` are copied (aligned) on first use. Arrays of tokens are read-only views of the file.
    DataError for files that are missing, cut short or inconsistent. A URL's files are fetched first, and `prefix` is
    where they are then.
    """

    def __init__(self, prefix: str | Path) -> None:
        *_, here = fetch_dataset(str(prefix))
        self.prefix = Path(here)
        self.bin_path, self.idx_path, self.info_path = dataset_paths(here)
        self._index = _map(self.idx_path)
        self.layout = IndexLayout.parse(self.idx_path, self._index[: HEADER.size], len(self._index))
        self.dtype = self.layout.dtype
        sizes_at, offsets_at, documents_at, _ = self.layout.starts()
        self._sizes_L = np.frombuffer(self._index, "<i4", len(self), sizes_at)  # in the file, unaligned
        self._offsets_L = np.frombuffer(self._index, "<i8", len(self), offsets_at)
        self._documents_D = np.frombuffer(self._index, "<i8", self.layout.num_boundaries, documents_at)
        self._map = self._map_tokens()
        self._tokens = np.frombuffer(self._map, self.dtype)
        self.random_access = False
        self._vocab_size: int | None = None
        self._check_documents()

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
        sequences = self._documents_D[i : i + 2].tolist()
        bytes_ = [self._offsets_L[each] if each < len(self) else len(self._map) for each in sequences]
        return self._tokens[bytes_[0] // self.dtype.itemsize : bytes_[1] // self.dtype.itemsize]

    def read(self, first_token: int, count: int) -> Array:
        """The tokens [first_token, first_token + count) of the dataset, across sequence boundaries; a view."""
        if not 0 <= first_token <= first_token + count <= self.num_tokens:
            raise IndexError(f"tokens {first_token} to {first_token + count} of a dataset of {self.num_tokens}")
        return self._checked(first_token, self._tokens[first_token : first_token + count])

    def tokenizer_identity(self) -> TokenizerIdentity | None:
        """The tokenizer that made it, if `PREFIX.json` says."""
        return None if self.info is None else self.info.tokenizer_identity()

    def tokenizer_path(self) -> Path | None:
        """The tokenizer's file beside it, if there is one."""
        name = None if self.info is None else self.info.tokenizer_file
        path = None if name is None else self.info_path.with_name(name)
        return path if path is not None and path.is_file() else None

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
        sizes = _aligned(self._sizes_L)
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
        return _aligned(self._offsets_L)

    @cached_property
    def document_index(self) -> Array:
        """First sequence of each document, then L; int64 [D]."""
        return _aligned(self._documents_D)

    def sequence_boundaries(self) -> Array:
        """First token of each sequence, then the number of all tokens; int64 [L + 1]. Reads the whole index."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.sizes, dtype=np.int64)])

    def document_boundaries(self) -> Array:
        """The same of each document; int64 [D]."""
        boundaries: Array = self.sequence_boundaries()[self.document_index]
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

    def _map_tokens(self) -> mmap.mmap | bytes:
        tokens = _map(self.bin_path)
        expected = int(self._offsets_L[-1]) + int(self._sizes_L[-1]) * self.dtype.itemsize if len(self) else 0
        if len(tokens) != expected or expected % self.dtype.itemsize:
            raise DataError(
                f"`{self.bin_path}` must be {expected:,} bytes long by its index, but is {len(tokens):,} instead; "
                "it was cut short or belongs to another index."
            )
        return tokens

    def _check_documents(self) -> None:
        ends = self._documents_D[[0, -1][: self.layout.num_boundaries]].tolist()
        if not ends or ends[0] != 0 or (self.num_documents and ends[1] != len(self)):
            raise DataError(
                f"the documents in `{self.idx_path}` must begin at sequence 0 and end at {len(self)}, "
                f"but the boundaries are {ends} instead; it is damaged."
            )


def _aligned(array: Array) -> Array:
    copy = array.copy()
    copy.flags.writeable = False
    return copy


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
        raise DataError(MISSING.format(path)) from None
    except OSError as error:
        raise DataError(f"`{path}` must be readable, but is not: {error.strerror}.") from error
