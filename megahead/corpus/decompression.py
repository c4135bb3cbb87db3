"""The decompressed bytes of a plain, .gz or .zst file (or of standard input), block by block."""

from __future__ import annotations

import gzip
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import IO

import zstandard

from megahead.errors import DataError

BLOCK_BYTES = 4 << 20
STANDARD_INPUT = Path("-")


def read_blocks(path: Path) -> Iterator[tuple[bytes, int]]:
    """Blocks of about 4 MB, each with the number of bytes of the file on disk that were read so far.

    DataError for a file that cannot be read to its end.
    """
    unpack = UNPACKERS.get(path.suffix, _plain_blocks)
    try:
        with nullcontext(sys.stdin.buffer) if path == STANDARD_INPUT else path.open("rb") as file:
            consumed = 0
            for data in unpack(file):
                consumed = consumed + len(data) if path == STANDARD_INPUT else file.tell()
                yield data, consumed
    except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
        raise DataError(f"`{path}` must be readable to its end, but is not ({error}); it may be cut short.") from error


def _plain_blocks(file: IO[bytes]) -> Iterator[bytes]:
    while data := file.read(BLOCK_BYTES):
        yield data


def _gzip_blocks(file: IO[bytes]) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=file) as unpacked:
        while data := unpacked.read(BLOCK_BYTES):
            yield data


def _zstd_blocks(file: IO[bytes]) -> Iterator[bytes]:
    """Decompresses frame by frame, since the library's own stream reader does not notice that a file was cut short.

    Reads little at a time, because nothing bounds the size of what comes out; it is yielded in whole blocks.
    """
    frame, parts, size = None, list[bytes](), 0
    while packed := file.read(BLOCK_BYTES // 32):
        while packed:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            parts.append(frame.decompress(packed))
            size += len(parts[-1])
            packed = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
        if size >= BLOCK_BYTES:
            yield b"".join(parts)
            parts, size = [], 0
    if frame is not None:
        raise EOFError("the last frame has no end")
    yield b"".join(parts)


UNPACKERS: dict[str, Callable[[IO[bytes]], Iterator[bytes]]] = {".gz": _gzip_blocks, ".zst": _zstd_blocks}
