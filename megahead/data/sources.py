"""Finds the input files of preprocessing, decompresses them and splits them into chunks of records."""

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
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import orjson
import zstandard

from megahead.data.records import Chunk, JsonLines, Selection, TableRows, TextFile, TextLines
from megahead.errors import DataError
from megahead.wording import format_names

if TYPE_CHECKING:
    import pyarrow as pa  # imported where tables are read: it takes longer than to read a small file of JSON lines

BLOCK_BYTES = 4 << 20
STANDARD_INPUT = Path("-")


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
        raise DataError(f"`{path}` must be readable to its end, but is not ({error}); it may be cut short.") from error


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


DECOMPRESSORS: dict[str, Callable[[IO[bytes]], Iterator[bytes]]] = {
    ".gz": lambda file: _plain_blocks(gzip.GzipFile(fileobj=file)),
    ".zst": _zstd_blocks,
}

# Inputs are files, globs, standard input and saved datasets. A new file type needs a subclass of `Chunk`, and in
# `CHUNKERS` a function that splits a file into such chunks.

MAX_TEXT_BYTES = 1 << 30
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
Chunker = Callable[[Path, Selection], Iterator[Chunk]]


@dataclass(frozen=True)
class Input:
    """One file of text, or one saved dataset, or standard input."""

    path: Path

    files: tuple[Path, ...]
    """The files to read, in order: several for a saved dataset, else only `path`."""

    name: str
    """The file name without the suffixes of its type."""

    bytes: int
    """Size on disk; 0 for standard input."""

    split: Chunker

    def chunks(self, selection: Selection) -> Iterator[Chunk]:
        """Its chunks in order, of about 4 MB of text each (more where one document is longer)."""
        for file in self.files:
            yield from self.split(file, selection)


def find_inputs(patterns: str | Path | Sequence[str | Path]) -> list[Input]:
    """The inputs of one or more files, folders (with their subfolders), globs (`**` too) or `-` (standard input). The
    files of a folder or glob are sorted by name.

    DataError for a missing file or an unknown file type.
    """
    patterns = [patterns] if isinstance(patterns, str | Path) else patterns
    if not patterns:
        raise DataError("there must be at least one input file, but none was given.")
    return [_make_input(path) for pattern in patterns for path in _expand_pattern(str(pattern))]


def input_names(patterns: str | Path | Sequence[str | Path]) -> str:
    """The inputs by the names of their files without paths, a folder by its own, a URL as it is."""
    patterns = [patterns] if isinstance(patterns, str | Path) else patterns
    return format_names(name for pattern in patterns for name in _names(str(pattern)))


def _names(pattern: str) -> list[str]:
    if "://" in pattern:
        return [pattern]
    if pattern == str(STANDARD_INPUT):
        return ["standard input"]
    return (
        [Path(pattern).resolve().name] if Path(pattern).is_dir() else [path.name for path in _expand_pattern(pattern)]
    )


def split_text_lines(inputs: Sequence[Input]) -> list[Input]:
    """The same inputs, of whose `.txt` files each line is a document."""
    return [
        replace(item, split=_chunk_text_lines) if item.split is _chunk_text and ".txt" in item.path.suffixes else item
        for item in inputs
    ]


def total_bytes(inputs: Sequence[Input]) -> int | None:
    """Bytes of all inputs on disk; None if standard input is among them."""
    return None if any(item.path == STANDARD_INPUT for item in inputs) else sum(item.bytes for item in inputs)


def max_documents(inputs: Sequence[Input]) -> int | None:
    """An upper bound of the number of documents if each file is one; else None."""
    return len(inputs) if all(item.split is _chunk_text for item in inputs) else None


def read_chunks(inputs: Sequence[Input], selection: Selection) -> Iterator[Chunk]:
    """The chunks of all inputs, one after the other."""
    for item in inputs:
        yield from item.chunks(selection)


def files_below(folder: Path) -> tuple[list[Path], list[Path]]:
    """(files and saved datasets below `folder`, files below it of unknown types), each sorted by name. Ignores hidden
    ones (`.name`). Follows linked folders, and reads each folder once."""
    readable, unknown, visited = list[Path](), list[Path](), set[Path]()
    for name, subfolders, files in os.walk(folder, followlinks=True):
        current = Path(name)
        if current.resolve() in visited:
            subfolders.clear()
            continue
        visited.add(current.resolve())
        if is_saved_dataset(current):
            readable.append(current)
            subfolders.clear()
            continue
        subfolders[:] = sorted(subfolder for subfolder in subfolders if not subfolder.startswith("."))
        for file in sorted(file for file in files if not file.startswith(".")):
            (readable if file.endswith(tuple(CHUNKERS)) else unknown).append(current / file)
    return readable, unknown


def _expand_pattern(pattern: str) -> list[Path]:
    folder = Path(pattern)
    if folder.is_dir() and not (is_saved_dataset(folder) or (folder / SPLITS_FILE).is_file()):
        if readable := files_below(folder)[0]:
            return readable
        raise DataError(f"`{folder}` must hold files that end in {SUFFIXES}, but holds none.")
    if Path(pattern).exists() or not glob.has_magic(pattern):
        return [Path(pattern)]
    matches = sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207 (a Path cannot glob an absolute pattern)
    if not matches:
        raise DataError(f"`{pattern}` must match a file, but matches none; check the pattern.")
    return [Path(path) for path in matches]


def _make_input(path: Path) -> Input:
    if path == STANDARD_INPUT:
        return Input(path, (path,), "stdin", 0, _chunk_json_lines)
    if path.is_dir():
        files = tuple(saved_dataset_files(path))
        return Input(path, files, path.name, sum(_file_bytes(file) for file in files), chunk_arrow)
    for suffix, split in CHUNKERS.items():
        if path.name.endswith(suffix):
            return Input(path, (path,), path.name.removesuffix(suffix), _file_bytes(path), split)
    raise DataError(f"`{path}` must end in {SUFFIXES}, but does not; convert or rename it.")


def _file_bytes(path: Path) -> int:
    if not path.is_file():
        raise DataError(f"`{path}` must be a text file, but there is none; check the path.")
    return path.stat().st_size


def _chunk_json_lines(path: Path, selection: Selection) -> Iterator[Chunk]:
    return _chunk_lines(path, selection, JsonLines)


def _chunk_text_lines(path: Path, selection: Selection) -> Iterator[Chunk]:
    return _chunk_lines(path, selection, TextLines)


def _chunk_lines(path: Path, selection: Selection, chunk_class: type[Chunk]) -> Iterator[Chunk]:
    """Blocks of whole lines, without the last newline of each."""
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
        yield chunk_class(str(path), first_line, block, selection, position - chunk_end)
        first_line += block.count(b"\n") + 1
        chunk_end = position
    if any(rest):
        yield chunk_class(str(path), first_line, b"".join(rest), selection, position - chunk_end)


def _chunk_text(path: Path, selection: Selection) -> Iterator[Chunk]:
    yield TextFile(str(path), 1, _read_whole(path, "one document"), selection, path.stat().st_size)


def _chunk_json(path: Path, selection: Selection) -> Iterator[Chunk]:
    """The items of a JSON array, or JSON lines if the file is none."""
    try:
        items = orjson.loads(_read_whole(path, "read at once").removeprefix(BYTE_ORDER_MARK))
    except orjson.JSONDecodeError:
        yield from _chunk_json_lines(path, selection)
        return
    lines = [orjson.dumps(item) for item in (items if isinstance(items, list) else [items])]
    boundaries, size = [*range(0, len(lines), 1000), len(lines)], path.stat().st_size  # [0] for an empty array
    for first, end in pairwise(boundaries):
        disk_bytes = size * end // len(lines) - size * first // len(lines)
        yield JsonLines(str(path), first + 1, b"\n".join(lines[first:end]), selection, disk_bytes)


def _chunk_csv(path: Path, selection: Selection) -> Iterator[Chunk]:
    """The rows of a `.csv` or `.tsv` file, whose first line names the columns."""
    position = 0

    def text_lines() -> Iterator[str]:
        nonlocal position
        rest, decoder = "", codecs.getincrementaldecoder("utf-8-sig")()
        for data, read in read_blocks(path):
            position = read
            *complete, rest = (rest + decoder.decode(data)).split("\n")
            yield from (f"{line}\n" for line in complete)
        yield rest + decoder.decode(b"", final=True)

    csv.field_size_limit(MAX_TEXT_BYTES)
    try:
        rows = csv.DictReader(text_lines(), delimiter="\t" if ".tsv" in path.suffixes else ",")
        columns = selection.columns(path, rows.fieldnames or ())
        first, chunk_start, lines, size = 1, 0, list[bytes](), 0
        for row in rows:
            lines.append(orjson.dumps({column: row[column] for column in columns}))
            size += len(lines[-1])
            if size >= BLOCK_BYTES:
                yield JsonLines(str(path), first, b"\n".join(lines), selection, position - chunk_start)
                first, chunk_start, lines, size = first + len(lines), position, [], 0
        yield JsonLines(str(path), first, b"\n".join(lines), selection, position - chunk_start)
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"`{path}` must be a table in UTF-8 text, but is not ({error}).") from error


def _read_whole(path: Path, reason: str) -> bytes:
    data = bytearray()
    for block, _ in read_blocks(path):
        data += block
        if len(data) > MAX_TEXT_BYTES:
            raise DataError(
                f"`{path}` must be shorter than 1 GiB, as a {path.suffix} file is {reason}, but is longer; "
                "turn it into .jsonl with one document a line."
            )
    return bytes(data)


ROWS_PER_READ = 64
STATE_FILE = "state.json"
SPLITS_FILE = "dataset_dict.json"


def chunk_parquet(path: Path, selection: Selection) -> Iterator[Chunk]:
    """The rows of a `.parquet` file; reads only the columns that are needed, a few pages at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
            columns = selection.columns(path, file.schema_arrow.names)
            batches = file.iter_batches(ROWS_PER_READ, columns=columns, use_threads=False)
            row_bytes = path.stat().st_size / max(file.metadata.num_rows, 1)
            yield from _chunk_batches(path, batches, selection, lambda row: int(row * row_bytes))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"`{path}` must be a readable Parquet file, but is not ({error}).") from error


def chunk_arrow(path: Path, selection: Selection) -> Iterator[Chunk]:
    """The rows of an `.arrow` file in the stream format that `Dataset.save_to_disk` writes."""
    import pyarrow as pa

    try:
        with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as stream:
            columns = selection.columns(path, stream.schema.names)
            batches = (batch.select(columns) for batch in stream)
            slices = (batch.slice(i, ROWS_PER_READ) for batch in batches for i in range(0, len(batch), ROWS_PER_READ))
            yield from _chunk_batches(path, slices, selection, lambda row: source.tell())
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"`{path}` must be a readable Arrow stream, but is not ({error}).") from error


def is_saved_dataset(folder: Path) -> bool:
    """Whether `Dataset.save_to_disk` wrote the folder; other programs write a `state.json`, too."""
    return (folder / STATE_FILE).is_file() and b'"_data_files"' in (folder / STATE_FILE).read_bytes()


def saved_dataset_files(folder: Path) -> list[Path]:
    """The Arrow files of a saved Hugging Face dataset, in order. DataError for one with several splits."""
    if (folder / SPLITS_FILE).is_file():
        splits = orjson.loads((folder / SPLITS_FILE).read_bytes())["splits"]
        raise DataError(f"`{folder}` must be one split of a saved dataset, but holds {', '.join(splits)}; name one.")
    state = orjson.loads((folder / STATE_FILE).read_bytes())
    if state.get("_indices_data_files"):
        raise DataError(f"`{folder}` must be saved flat, but has an index mapping; save it after flatten_indices().")
    return [folder / file["filename"] for file in state["_data_files"]]


def _chunk_batches(
    path: Path, batches: Iterable[pa.RecordBatch], selection: Selection, bytes_before: Callable[[int], int]
) -> Iterator[TableRows]:
    """Joins batches to chunks of about one block of text each; `bytes_before`: bytes of the file before a row."""
    import pyarrow as pa

    first = position = 0
    for group in _group_batches(batches):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, group[0].schema) as writer:
            for batch in group:
                writer.write_batch(batch)  # of a slice, writes its rows and not the whole batch
        end = first + sum(map(len, group))
        disk_bytes = bytes_before(end) - position
        yield TableRows(str(path), first + 1, sink.getvalue().to_pybytes(), selection, disk_bytes)
        first, position = end, position + disk_bytes


def _group_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    """Consecutive batches in lists of about one block of text each."""
    group = list[Any]()
    for batch in batches:
        group.append(batch)
        if sum(part.get_total_buffer_size() for part in group) >= BLOCK_BYTES:
            yield group
            group = []
    if group:
        yield group


_TEXT_CHUNKERS: dict[str, Chunker] = {
    ".jsonl": _chunk_json_lines,
    ".json": _chunk_json,
    ".txt": _chunk_text,
    ".md": _chunk_text,
    ".csv": _chunk_csv,
    ".tsv": _chunk_csv,
}
CHUNKERS = {
    f"{suffix}{compression}": split for suffix, split in _TEXT_CHUNKERS.items() for compression in ("", *DECOMPRESSORS)
} | {".parquet": chunk_parquet, ".arrow": chunk_arrow}
SUFFIXES = f"one of {', '.join(_TEXT_CHUNKERS)} (or these with .gz or .zst), .parquet, .arrow"
