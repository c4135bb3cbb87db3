"""Reads compressed files and the files in archives, to their end."""

from __future__ import annotations

import gzip
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import IO, Self

import zstandard

from megahead.data.records import BLOCK_BYTES
from megahead.errors import DataError

STANDARD_INPUT = Path("-")
MAX_ZSTD_WINDOW = 1 << 31
"""The largest window of zstd, in bytes (`zstd --ultra --long=31`)."""


def read_blocks(path: Path) -> Iterator[tuple[bytes, int]]:
    """The decompressed bytes of a file or of standard input, in blocks of about 4 MB, each with the number of bytes on
    disk that were read so far.

    DataError for a file that cannot be read to its end.
    """
    decompress = DECOMPRESSORS.get(path.suffix, _plain_blocks)
    try:
        with nullcontext(sys.stdin.buffer) if path == STANDARD_INPUT else path.open("rb") as file:
            consumed = 0
            for data in decompress(file):
                consumed = consumed + len(data) if path == STANDARD_INPUT else file.tell()
                yield data, consumed
    except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
        hint = "; it may be cut short" if getattr(error, "errno", None) is None else ""
        raise DataError(f"`{path}` must be readable to its end, but is not ({error}){hint}.") from error


def _plain_blocks(file: IO[bytes] | gzip.GzipFile) -> Iterator[bytes]:
    while data := file.read(BLOCK_BYTES):
        yield data


def _zstd_blocks(file: IO[bytes]) -> Iterator[bytes]:
    """Decompresses frame by frame, since the library's own stream reader does not notice that a file was cut short.

    Reads a little at a time, since nothing bounds the decompressed size, and yields whole blocks.
    """
    frame, parts, size = None, list[bytes](), 0
    while packed := file.read(BLOCK_BYTES // 32):
        while packed:
            frame = frame or zstandard.ZstdDecompressor(max_window_size=MAX_ZSTD_WINDOW).decompressobj()
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


DECOMPRESSORS: dict[str, Callable[[IO[bytes]], Iterator[bytes]]] = {
    ".gz": lambda file: _plain_blocks(gzip.GzipFile(fileobj=file)),
    ".zst": _zstd_blocks,
}

GZIP_MAGIC = b"\x1f\x8b"


class _TarHeader(tarfile.TarInfo):
    """A header of a tar archive. A missing or damaged one is an error, and not the archive's end as for `tarfile`."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined] # zeros, which end an archive
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"{error} instead of a file or the end mark") from error


def _tar_members(file: IO[bytes]) -> Iterator[tuple[str, IO[bytes]]]:
    """Refuses archives without an end mark, which GNU tar reads in silence: one may be cut between two members."""
    is_gzip = file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
    file.seek(0)
    stream = gzip.GzipFile(fileobj=file) if is_gzip else file
    escape = "backslashreplace"  # names go into reports and manifests, which are UTF-8
    with tarfile.open(fileobj=stream, mode="r:", tarinfo=_TarHeader, errors=escape) as archive:
        for member in archive:
            if member.isfile() and (content := archive.extractfile(member)) is not None:
                yield member.name, content
    if any(block.strip(b"\0") for block in _plain_blocks(stream)):  # also compares the checksum of gzip
        raise tarfile.ReadError("more follows its end mark")


def _zip_members(file: IO[bytes]) -> Iterator[tuple[str, IO[bytes]]]:
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            if not member.is_dir():
                with archive.open(member) as content:
                    yield member.filename, content


ARCHIVES: dict[str, Callable[[IO[bytes]], Iterator[tuple[str, IO[bytes]]]]] = {
    ".tar": _tar_members,
    ".tar.gz": _tar_members,
    ".tgz": _tar_members,
    ".zip": _zip_members,
}
