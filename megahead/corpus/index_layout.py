"""The bytes of an `.idx` file (Megatron "MMIDIDX", version 1): where each array is, and what must hold.

    0  magic (9)    9  version u64    17  dtype code u8    18  L u64    26  D u64
    34            sizes       L x i32   tokens of each sequence
    34 +  4 L     offsets     L x i64   byte offset of each sequence in `.bin`
    34 + 12 L     documents   D x i64   where documents begin, as indices into the sequences; starts at 0, ends at L
    34 + 12 L + 8 D   modes   L x i8    optional (multimodal data), ignored here

All integers are little-endian. The header's 34 bytes leave every array unaligned.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megahead.errors import DataError
from megahead.wording import counted

MAGIC = b"MMIDIDX\0\0"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype] = {
    code: np.dtype(name) for code, name in {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}.items()
}
LARGEST_UINT16_VOCABULARY = 65_500


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

    @property
    def sizes_at(self) -> int:
        return HEADER.size

    @property
    def offsets_at(self) -> int:
        return self.sizes_at + 4 * self.num_sequences

    @property
    def documents_at(self) -> int:
        return self.offsets_at + 8 * self.num_sequences

    @property
    def end(self) -> int:
        return self.documents_at + 8 * self.num_boundaries

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
        if file_bytes not in (layout.end, layout.end + sequences):
            raise DataError(
                f"`{path}` must be {layout.end:,} bytes long for {counted(sequences, 'sequence')} and "
                f"{boundaries:,} document boundaries, but is {file_bytes:,} instead; it was cut short or is damaged."
            )
        return layout
