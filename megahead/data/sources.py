"""The input of preprocessing: files found, decompressed, cut into chunks and parsed into documents."""

from __future__ import annotations

import codecs
import csv
import glob
import gzip
import io
import os
import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import orjson
import zstandard

from megahead.errors import DataError, FieldError

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


Condition = tuple[str, str]


class Unfit(Exception):
    """Says what is wrong with a record; the error sentence begins with the record's FILE:LINE."""


@dataclass(frozen=True)
class Selection:
    """Reads one record (a JSON object or string, a row of a table) as a document.

    Keys may be nested: `meta.pile_set_name` is the record's key of exactly that name or, if there is none, the key
    `pile_set_name` of its `meta`.
    """

    text_key: str | tuple[str, ...] = "text"
    """Key of the text, or several: the first that a record has counts."""

    keep: tuple[Condition, ...] = ()
    """(key, value) pairs: only records that have, for each key in them, one of its values. All records if empty."""

    drop: tuple[Condition, ...] = ()
    """(key, value) pairs: records that have any of these are left out."""

    def text(self, record: Any) -> str | None:
        """The document's text; None for a record that is not wanted. Raises Unfit for a record without text."""
        if (self.keep or self.drop) and not self._wanted(record):
            return None
        if isinstance(record, str):
            return record
        key, text = self._first(record)
        if not isinstance(text, str):
            raise Unfit(f"must have a string in `{key}`, but has {type(text).__name__} instead")
        return text

    def columns(self, path: Path, names: Sequence[str]) -> list[str]:
        """The top-level columns of the table in `path` that must be read, of those in `names`; DataError without."""
        keys = self._text_keys()
        text_key = next((key for key in keys if key in names or key.split(".")[0] in names), keys[0])
        wanted = [text_key, *(key for key, _ in self.keep + self.drop)]
        found = {key: key if key in names else key.split(".")[0] for key in wanted}
        for key, column in found.items():
            if column not in names:
                known = ", ".join(names)
                raise DataError(f"`{path}` must have a column for '{key}', but has {known}; see --text-key.")
        return list(dict.fromkeys(found.values()))

    def _first(self, record: Any) -> tuple[str, Any]:
        for key in self._text_keys():
            with suppress(KeyError):
                return key, _at(record, key)
        raise Unfit(f"must have the key `{'` or `'.join(self._text_keys())}`, but has not; see --text-key")

    def _text_keys(self) -> tuple[str, ...]:
        return (self.text_key,) if isinstance(self.text_key, str) else self.text_key

    def _wanted(self, record: Any) -> bool:
        kept = all((key, _value(record, key)) in self.keep for key, _ in self.keep)
        return kept and not any((key, _value(record, key)) in self.drop for key, _ in self.drop)


def text_keys(given: Sequence[str]) -> str | tuple[str, ...]:
    """A key alone as Selection had it before there could be several: folders of `--per-file` hold it so."""
    return given[0] if len(given) == 1 else tuple(given)


def conditions(field: str, given: Sequence[str]) -> tuple[Condition, ...]:
    """`KEY=VALUE` texts as pairs; FieldError for one without `=`."""
    for text in given:
        if "=" not in text:
            raise FieldError(field, "be KEY=VALUE, like meta.pile_set_name=ArXiv", got=text)
    return tuple((key, value) for key, _, value in (text.partition("=") for text in given))


def _value(record: Any, key: str) -> str | None:
    """The value of `key`, as text; None if there is none (so a filter never fails)."""
    try:
        return str(_at(record, key))
    except KeyError:
        return None


def _at(record: Any, key: str) -> Any:
    """The value under a key or a path of keys. KeyError where there is none."""
    if not isinstance(record, Mapping):
        raise KeyError(key)
    if key in record:
        return record[key]
    head, dot, rest = key.partition(".")
    if not dot or head not in record:
        raise KeyError(key)
    return _at(record[head], rest)


@dataclass
class Parsed:
    """The documents of a chunk, and what did not become a document."""

    texts: list[str] = field(default_factory=list)
    """The documents' texts, none of them empty."""

    empty: list[str] = field(default_factory=list)
    """`FILE:LINE` of documents without text."""

    broken: list[str] = field(default_factory=list)
    """A sentence that begins with `FILE:LINE` for everything that could not be read."""

    left_out: int = 0
    """Documents that the selection does not want."""

    def strict(self) -> list[str]:
        """The texts; DataError for the first broken place."""
        if self.broken:
            raise DataError(self.broken[0])
        return self.texts

    def add(self, place: str, text: str | None) -> None:
        """Adds what the selection made of the record at `place`: a text, or None if it is not wanted."""
        if text is None:
            self.left_out += 1
        elif not text or text.isspace():
            self.empty.append(place)
        else:
            self.texts.append(text)


@dataclass(frozen=True)
class Chunk(ABC):
    """A piece of an input that becomes documents: cut cheaply in the main process, parsed in any process."""

    path: str
    first: int
    """The number of its first record in the input, from 1."""

    data: bytes
    selection: Selection
    consumed: int
    """Bytes of the file on disk that were read for it."""

    @abstractmethod
    def parse(self) -> Parsed:
        """Its documents."""

    def _parsed(self, records: Iterable[tuple[int, Any]], text: Callable[[Any], str | None]) -> Parsed:
        """What numbered records become by `text`."""
        parsed = Parsed()
        for number, record in records:
            try:
                parsed.add(f"{self.path}:{number}", text(record))
            except Unfit as problem:
                parsed.broken.append(f"`{self.path}:{number}` {problem}.")
        return parsed


class JsonLines(Chunk):
    """Whole lines of a `.jsonl` file, one JSON object each; blank lines are ignored."""

    def parse(self) -> Parsed:
        """One document per line."""
        lines = enumerate(io.BytesIO(self.data), self.first)  # one by one: a list would hold the block twice
        return self._parsed(((number, line) for number, line in lines if line.strip()), self._text)

    def _text(self, line: bytes) -> str | None:
        try:
            record = orjson.loads(line.removesuffix(b"\n"))
        except orjson.JSONDecodeError as error:
            raise Unfit(f"must be one JSON object in UTF-8, but is not ({error})") from None
        return self.selection.text(record)


class Rows(Chunk):
    """Rows of a table (Parquet, Arrow), the wanted columns only, in Arrow's own stream format."""

    def parse(self) -> Parsed:
        """One document per row."""
        import pyarrow.ipc

        table = pyarrow.ipc.open_stream(self.data).read_all()
        try:
            rows = table.to_pylist()
        except UnicodeDecodeError:  # somewhere
            rows = [table.slice(row, 1) for row in range(table.num_rows)]
        return self._parsed(enumerate(rows, self.first), self._text)

    def _text(self, row: Any) -> str | None:
        """Of a row, or of a table that is one row."""
        try:
            return self.selection.text(row if isinstance(row, dict) else row.to_pylist()[0])
        except UnicodeDecodeError as error:
            raise Unfit(f"must be UTF-8 text, but is not ({error.reason})") from None


class TextFile(Chunk):
    """A whole `.txt` or `.md` file: one document."""

    def parse(self) -> Parsed:
        """The file's text, without a byte-order mark."""
        parsed = Parsed()
        try:
            parsed.add(self.path, self.data.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            line = self.data.count(b"\n", 0, error.start) + 1
            parsed.broken.append(f"`{self.path}:{line}` must be UTF-8 text, but is not ({error.reason}).")
        return parsed


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


def read_chunks(inputs: Sequence[Input], selection: Selection) -> Iterator[Chunk]:
    """The chunks of all inputs, one after the other."""
    for item in inputs:
        yield from item.chunks(selection)


def files_below(folder: Path) -> tuple[list[Path], list[Path]]:
    """The files and saved datasets in `folder` and the folders in it that can be read, and the files that cannot, as
    their endings are none of `KINDS`; both in order of name. What is hidden (`.name`) is neither."""
    readable, others = list[Path](), list[Path]()
    for name, folders, files in os.walk(folder):
        here = Path(name)
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
        raise DataError(f"`{folder}` must hold files that end in {ENDINGS}, but holds none.")
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
    raise DataError(f"`{path}` must end in {ENDINGS}, but does not; convert or rename it.")


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
ENDINGS = f"one of {', '.join(_TEXTS)} (or these with .gz or .zst), .parquet, .arrow"
