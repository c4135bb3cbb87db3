"""Text files as a stream of chunks. Cutting is cheap and done in one place; parsing a chunk is dear and done anywhere.

A new kind of input is a class with `texts()` (parsed by a worker process, hence picklable) and a function that cuts a
file into such chunks, listed in `KINDS`.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

import orjson
import zstandard

from megahead.errors import DataError

BLOCK_BYTES = 4 << 20
LONGEST_TEXT = 1 << 30
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Chunk(Protocol):
    """A piece of an input that becomes documents."""

    @property
    def consumed(self) -> int:
        """Bytes of the file on disk that were read for it."""

    def texts(self) -> list[str]:
        """Its documents, empty ones included. DataError that names file and line for a broken one."""


@dataclass(frozen=True)
class JsonLines:
    """Whole lines of a `.jsonl` file, one JSON object each."""

    path: str
    first_line: int
    block: bytes
    text_key: str
    consumed: int

    def texts(self) -> list[str]:
        """The `text_key` of each line; blank lines are nothing."""
        lines = enumerate(self.block.split(b"\n"), self.first_line)
        return [self._text(number, line) for number, line in lines if line.strip()]

    def _text(self, number: int, line: bytes) -> str:
        try:
            text = orjson.loads(line)[self.text_key]
        except orjson.JSONDecodeError as error:
            raise self._broken(number, f"must be one JSON object in UTF-8, but is not ({error})") from None
        except (KeyError, TypeError, IndexError):
            raise self._broken(number, f"must have the key `{self.text_key}`, but has not; see --text-key") from None
        if not isinstance(text, str):
            raise self._broken(
                number, f"must have a string in `{self.text_key}`, but has {type(text).__name__} instead"
            )
        return text

    def _broken(self, number: int, problem: str) -> DataError:
        return DataError(f"`{self.path}:{number}` {problem}.")


@dataclass(frozen=True)
class TextFile:
    """A whole `.txt` file: one document."""

    path: str
    data: bytes
    consumed: int

    def texts(self) -> list[str]:
        """The file's text, without a byte-order mark."""
        try:
            return [self.data.decode("utf-8-sig")]
        except UnicodeDecodeError as error:
            line = self.data.count(b"\n", 0, error.start) + 1
            raise DataError(f"`{self.path}:{line}` must be UTF-8 text, but is not ({error.reason}).") from None


def read_chunks(paths: Sequence[str | Path], text_key: str) -> Iterator[Chunk]:
    """The chunks of all files, in order, about 4 MB of text each (more where one line is longer)."""
    for path in map(Path, paths):
        yield from _kind(path)(path, text_key)


def check_inputs(paths: Sequence[str | Path]) -> int:
    """Bytes of all files on disk. DataError for one that is missing, or of an unknown kind."""
    if not paths:
        raise DataError("there must be at least one input file, but none was given.")
    for path in map(Path, paths):
        _kind(path)
        if not path.is_file():
            raise DataError(f"`{path}` must be a text file, but there is none; check the path.")
    return sum(Path(path).stat().st_size for path in paths)


def _cut_json_lines(path: Path, text_key: str) -> Iterator[Chunk]:
    first_line, chunk_end, position, rest = 1, 0, 0, b""
    for data, position in _read_blocks(path):
        if first_line == 1 and not rest:
            data = data.removeprefix(BYTE_ORDER_MARK)
        head, newline, tail = data.rpartition(b"\n")
        if not newline:
            rest += tail
            if len(rest) > LONGEST_TEXT:
                raise DataError(f"`{path}:{first_line}` must be shorter than 1 GiB, but the line is longer; split it.")
            continue
        yield JsonLines(str(path), first_line, rest + head, text_key, position - chunk_end)
        first_line += head.count(b"\n") + 1
        chunk_end, rest = position, tail
    if rest:
        yield JsonLines(str(path), first_line, rest, text_key, position - chunk_end)


def _cut_text(path: Path, text_key: str) -> Iterator[Chunk]:
    parts: list[bytes] = []
    for data, _ in _read_blocks(path):
        parts.append(data)
        if sum(map(len, parts)) > LONGEST_TEXT:
            raise DataError(
                f"`{path}` must be shorter than 1 GiB, as a .txt file is one document, but is longer; "
                "turn it into .jsonl with one document a line."
            )
    yield TextFile(str(path), b"".join(parts), path.stat().st_size)


KINDS: dict[str, Callable[[Path, str], Iterator[Chunk]]] = {
    f"{kind}{packed}": cut
    for kind, cut in {".jsonl": _cut_json_lines, ".txt": _cut_text}.items()
    for packed in ("", ".gz", ".zst")
}


def _kind(path: Path) -> Callable[[Path, str], Iterator[Chunk]]:
    for ending, cut in KINDS.items():
        if path.name.endswith(ending):
            return cut
    raise DataError(f"`{path}` must end in one of {', '.join(KINDS)}, but does not; convert or rename it.")


def _read_blocks(path: Path) -> Iterator[tuple[bytes, int]]:
    """The file's unpacked bytes in blocks, each with the bytes of the file on disk read by then."""
    unpack = next((unpack for ending, unpack in UNPACKERS.items() if path.name.endswith(ending)), _plain_blocks)
    try:
        with path.open("rb") as file:
            for data in unpack(file):
                yield data, file.tell()
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
    """One frame after the other. (The library's own stream reader takes a file that was cut short for a whole one.)"""
    frame = None
    while packed := file.read(BLOCK_BYTES // 4):
        while packed:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            yield frame.decompress(packed)
            packed = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("the last frame has no end")


UNPACKERS = {".gz": _gzip_blocks, ".zst": _zstd_blocks}
