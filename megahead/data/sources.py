"""The input of preprocessing: files found, decompressed and cut into chunks of records."""

from __future__ import annotations

import codecs
import csv
import glob
import gzip
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import orjson
import zstandard

from megahead.data.records import Chunk, JsonLines, Rows, Selection, TextFile
from megahead.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa  # imported where tables are read: it takes longer than to read a small file of JSON lines

BLOCK_BYTES = 4 << 20
STANDARD_INPUT = Path("-")


def read_blocks(path: Path) -> Iterator[tuple[bytes, int]]:
    """The decompressed bytes of a file or of standard input, in blocks of about 4 MB, each with the number of bytes on
    disk that were read so far.

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


def _plain_blocks(file: IO[bytes] | gzip.GzipFile) -> Iterator[bytes]:
    while data := file.read(BLOCK_BYTES):
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


UNPACKERS: dict[str, Callable[[IO[bytes]], Iterator[bytes]]] = {
    ".gz": lambda file: _plain_blocks(gzip.GzipFile(fileobj=file)),
    ".zst": _zstd_blocks,
}

# Finds, checks and cuts into chunks what the user gave as input: files, globs, standard input, saved datasets. A new
# kind of input is a chunk and a function that cuts a file into such chunks, in `KINDS`.

MAX_TEXT_BYTES = 1 << 30
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
Cutter = Callable[[Path, Selection], Iterator[Chunk]]


@dataclass(frozen=True)
class Input:
    """One file of text, or one saved dataset, or standard input."""

    path: Path

    files: tuple[Path, ...]
    """The files that are read for it, in order: several for a saved dataset, else only itself."""

    name: str
    """Its file name without the ending of its kind."""

    bytes: int
    """Its size on disk; 0 for standard input."""

    cut: Cutter

    def chunks(self, selection: Selection) -> Iterator[Chunk]:
        """Its chunks in order, about 4 MB of text each (more where one document is longer)."""
        for file in self.files:
            yield from self.cut(file, selection)


def find_inputs(patterns: str | Path | Sequence[str | Path]) -> list[Input]:
    """The inputs that a path or several, folders (with those in them), globs (`**` too) and `-` (standard input) stand
    for; those of a folder or glob in order of name.

    DataError for what is missing or of an unknown kind.
    """
    patterns = [patterns] if isinstance(patterns, str | Path) else patterns
    if not patterns:
        raise DataError("there must be at least one input file, but none was given.")
    return [_input(path) for pattern in patterns for path in _paths(str(pattern))]


def total_bytes(inputs: Sequence[Input]) -> int | None:
    """Bytes of all inputs on disk; None if standard input is among them."""
    return None if any(item.path == STANDARD_INPUT for item in inputs) else sum(item.bytes for item in inputs)


def most_documents(inputs: Sequence[Input]) -> int | None:
    """How many documents they have at most, where each file is one; None where only reading tells."""
    return len(inputs) if all(item.cut is _cut_text for item in inputs) else None


def read_chunks(inputs: Sequence[Input], selection: Selection) -> Iterator[Chunk]:
    """The chunks of all inputs, one after the other."""
    for item in inputs:
        yield from item.chunks(selection)


def files_below(folder: Path) -> tuple[list[Path], list[Path]]:
    """The files and saved datasets in `folder` and the folders in it that can be read, and the files that cannot, as
    their endings are none of `KINDS`; both in order of name. What is hidden (`.name`) is neither. Linked folders are
    followed, each folder is read once."""
    readable, others, seen = list[Path](), list[Path](), set[Path]()
    for name, folders, files in os.walk(folder, followlinks=True):
        here = Path(name)
        if here.resolve() in seen:
            folders.clear()
            continue
        seen.add(here.resolve())
        if is_saved_dataset(here):
            readable.append(here)
            folders.clear()
            continue
        folders[:] = sorted(inner for inner in folders if not inner.startswith("."))
        for file in sorted(file for file in files if not file.startswith(".")):
            (readable if file.endswith(tuple(KINDS)) else others).append(here / file)
    return readable, others


def _paths(pattern: str) -> list[Path]:
    folder = Path(pattern)
    if folder.is_dir() and not (is_saved_dataset(folder) or (folder / SPLITS).is_file()):
        if readable := files_below(folder)[0]:
            return readable
        raise DataError(f"`{folder}` must hold files that end in {SUFFIXES}, but holds none.")
    if Path(pattern).exists() or not glob.has_magic(pattern):
        return [Path(pattern)]
    found = sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207 (a Path cannot glob an absolute pattern)
    if not found:
        raise DataError(f"`{pattern}` must match a file, but matches none; check the pattern.")
    return [Path(path) for path in found]


def _input(path: Path) -> Input:
    if path == STANDARD_INPUT:
        return Input(path, (path,), "stdin", 0, _cut_json_lines)
    if path.is_dir():
        files = tuple(saved_dataset_files(path))
        return Input(path, files, path.name, sum(_size(file) for file in files), cut_arrow)
    for ending, cut in KINDS.items():
        if path.name.endswith(ending):
            return Input(path, (path,), path.name.removesuffix(ending), _size(path), cut)
    raise DataError(f"`{path}` must end in {SUFFIXES}, but does not; convert or rename it.")


def _size(path: Path) -> int:
    if not path.is_file():
        raise DataError(f"`{path}` must be a text file, but there is none; check the path.")
    return path.stat().st_size


def _cut_json_lines(path: Path, selection: Selection) -> Iterator[Chunk]:
    first_line, chunk_end, position = 1, 0, 0
    rest: list[bytes] = []
    for data, position in read_blocks(path):
        if first_line == 1 and not rest:
            data = data.removeprefix(BYTE_ORDER_MARK)
        head, newline, tail = data.rpartition(b"\n")
        if not newline:
            rest.append(tail)
            if sum(map(len, rest)) > MAX_TEXT_BYTES:
                raise DataError(f"`{path}:{first_line}` must be shorter than 1 GiB, but the line is longer; split it.")
            continue
        block = b"".join([*rest, head])
        rest = [tail]  # before the yield, so that the parts of a long document are freed
        yield JsonLines(str(path), first_line, block, selection, position - chunk_end)
        first_line += block.count(b"\n") + 1
        chunk_end = position
    if any(rest):
        yield JsonLines(str(path), first_line, b"".join(rest), selection, position - chunk_end)


def _cut_text(path: Path, selection: Selection) -> Iterator[Chunk]:
    yield TextFile(str(path), 1, _whole(path, "one document"), selection, path.stat().st_size)


def _cut_json(path: Path, selection: Selection) -> Iterator[Chunk]:
    """The items of a JSON array; a file of JSON lines may be named so, too."""
    try:
        items = orjson.loads(_whole(path, "read at once").removeprefix(BYTE_ORDER_MARK))
    except orjson.JSONDecodeError:
        yield from _cut_json_lines(path, selection)
        return
    lines = [orjson.dumps(item) for item in (items if isinstance(items, list) else [items])]
    cut, size = [*range(0, len(lines), 1000), len(lines)], path.stat().st_size  # of none, [0]
    for first, end in pairwise(cut):
        consumed = size * end // len(lines) - size * first // len(lines)
        yield JsonLines(str(path), first + 1, b"\n".join(lines[first:end]), selection, consumed)


def _cut_csv(path: Path, selection: Selection) -> Iterator[Chunk]:
    """The rows of a `.csv` or `.tsv` file, whose first line names the columns."""
    position = 0

    def lines() -> Iterator[str]:
        nonlocal position
        rest, decoder = "", codecs.getincrementaldecoder("utf-8-sig")()
        for data, read in read_blocks(path):
            position = read
            *whole, rest = (rest + decoder.decode(data)).split("\n")
            yield from (f"{line}\n" for line in whole)
        yield rest + decoder.decode(b"", final=True)

    csv.field_size_limit(MAX_TEXT_BYTES)
    try:
        rows = csv.DictReader(lines(), delimiter="\t" if ".tsv" in path.suffixes else ",")
        columns = selection.columns(path, rows.fieldnames or ())
        first, before, waiting, size = 1, 0, list[bytes](), 0
        for row in rows:
            waiting.append(orjson.dumps({column: row[column] for column in columns}))
            size += len(waiting[-1])
            if size >= BLOCK_BYTES:
                yield JsonLines(str(path), first, b"\n".join(waiting), selection, position - before)
                first, before, waiting, size = first + len(waiting), position, [], 0
        yield JsonLines(str(path), first, b"\n".join(waiting), selection, position - before)
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"`{path}` must be a table in UTF-8 text, but is not ({error}).") from error


def _whole(path: Path, why: str) -> bytes:
    data = bytearray()
    for block, _ in read_blocks(path):
        data += block
        if len(data) > MAX_TEXT_BYTES:
            raise DataError(
                f"`{path}` must be shorter than 1 GiB, as a {path.suffix} file is {why}, but is longer; "
                "turn it into .jsonl with one document a line."
            )
    return bytes(data)


ROWS_AT_ONCE = 64
STATE = "state.json"
SPLITS = "dataset_dict.json"


def cut_parquet(path: Path, selection: Selection) -> Iterator[Chunk]:
    """The rows of a `.parquet` file; reads only the columns that are needed, a few pages at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
            columns = selection.columns(path, file.schema_arrow.names)
            batches = file.iter_batches(ROWS_AT_ONCE, columns=columns, use_threads=False)
            row_bytes = path.stat().st_size / max(file.metadata.num_rows, 1)
            yield from _chunks(path, batches, selection, lambda row: int(row * row_bytes))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"`{path}` must be a readable Parquet file, but is not ({error}).") from error


def cut_arrow(path: Path, selection: Selection) -> Iterator[Chunk]:
    """The rows of an `.arrow` file in the stream format that `Dataset.save_to_disk` writes."""
    import pyarrow as pa

    try:
        with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as stream:
            columns = selection.columns(path, stream.schema.names)
            batches = (batch.select(columns) for batch in stream)
            slices = (batch.slice(at, ROWS_AT_ONCE) for batch in batches for at in range(0, len(batch), ROWS_AT_ONCE))
            yield from _chunks(path, slices, selection, lambda row: source.tell())
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"`{path}` must be a readable Arrow stream, but is not ({error}).") from error


def is_saved_dataset(folder: Path) -> bool:
    """Whether it is one of Hugging Face's: other programs have a `state.json`, too."""
    return (folder / STATE).is_file() and b'"_data_files"' in (folder / STATE).read_bytes()


def saved_dataset_files(folder: Path) -> list[Path]:
    """The Arrow files of a saved Hugging Face dataset, in order. DataError for one with several splits."""
    if (folder / SPLITS).is_file():
        splits = orjson.loads((folder / SPLITS).read_bytes())["splits"]
        raise DataError(f"`{folder}` must be one split of a saved dataset, but holds {', '.join(splits)}; name one.")
    state = orjson.loads((folder / STATE).read_bytes())
    if state.get("_indices_data_files"):
        raise DataError(f"`{folder}` must be saved flat, but has an index mapping; save it after flatten_indices().")
    return [folder / file["filename"] for file in state["_data_files"]]


def _chunks(
    path: Path, batches: Iterable[pa.RecordBatch], selection: Selection, position: Callable[[int], int]
) -> Iterator[Rows]:
    """Joins batches to chunks of about one block of text each; `position`: bytes of the file before a row."""
    import pyarrow as pa

    first = position_before = 0
    for joined in _blocks(batches):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, joined[0].schema) as writer:
            for batch in joined:
                writer.write_batch(batch)  # writes only the rows of a slice, not the whole batch that it is cut from
        end = first + sum(map(len, joined))
        consumed = position(end) - position_before
        yield Rows(str(path), first + 1, sink.getvalue().to_pybytes(), selection, consumed)
        first, position_before = end, position_before + consumed


def _blocks(batches: Iterable[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    waiting = list[Any]()
    for batch in batches:
        waiting.append(batch)
        if sum(part.get_total_buffer_size() for part in waiting) >= BLOCK_BYTES:
            yield waiting
            waiting = []
    if waiting:
        yield waiting


_TEXTS: dict[str, Cutter] = {
    ".jsonl": _cut_json_lines,
    ".json": _cut_json,
    ".txt": _cut_text,
    ".md": _cut_text,
    ".csv": _cut_csv,
    ".tsv": _cut_csv,
}
KINDS = {f"{kind}{packed}": cut for kind, cut in _TEXTS.items() for packed in ("", *UNPACKERS)}
KINDS |= {".parquet": cut_parquet, ".arrow": cut_arrow}
SUFFIXES = f"one of {', '.join(_TEXTS)} (or these with .gz or .zst), .parquet, .arrow"
