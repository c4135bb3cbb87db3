"""Turns records of text (JSON lines, rows of tables, whole files) into documents, filters them, and splits tables."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from megahead.errors import DataError, FieldError

if TYPE_CHECKING:
    import pyarrow as pa  # imported where tables are read: it takes longer than to read a small file of JSON lines

Condition = tuple[str, str]
BLOCK_BYTES = 4 << 20  # of text in a chunk, about


class InvalidRecord(Exception):
    """A record cannot be read. The message completes a sentence that begins with its FILE:LINE."""


@dataclass(frozen=True)
class Selection:
    """Selects records (JSON objects or strings, rows of tables), and reads their texts.

    Keys may be nested: `meta.pile_set_name` is the record's key of exactly that name or, if there is none, the key
    `pile_set_name` of its `meta`.
    """

    text_key: str | tuple[str, ...] = "text"
    """Key of the text, or several keys, of which the first that a record has is read."""

    keep: tuple[Condition, ...] = ()
    """(key, value) pairs: a record is kept if, for each key among them, it has one of that key's values."""

    drop: tuple[Condition, ...] = ()
    """(key, value) pairs: a record that has any of them is dropped."""

    def text(self, record: Any) -> str | None:
        """The document's text; None for a record that is filtered out. InvalidRecord for a record without text."""
        if (self.keep or self.drop) and not self._is_selected(record):
            return None
        if isinstance(record, str):
            return record
        key, text = self._find_text(record)
        if not isinstance(text, str):
            raise InvalidRecord(f"must have a string in `{key}`, but has {type(text).__name__} instead")
        return text

    def columns(self, path: Path | str, names: Sequence[str]) -> list[str]:
        """The top-level columns to read of the table in `path`, which has the columns `names`; DataError if it lacks
        one of them."""
        keys = self._text_keys()
        text_key = next((key for key in keys if key in names or key.split(".")[0] in names), keys[0])
        needed = [text_key, *(key for key, _ in self.keep + self.drop)]
        column_by_key = {key: key if key in names else key.split(".")[0] for key in needed}
        for key, column in column_by_key.items():
            if column not in names:
                raise DataError(f"`{path}` must have a column for '{key}', but has {', '.join(names)}; see --text-key.")
        return list(dict.fromkeys(column_by_key.values()))

    def _find_text(self, record: Any) -> tuple[str, Any]:
        for key in self._text_keys():
            with suppress(KeyError):
                return key, _nested_value(record, key)
        raise InvalidRecord(f"must have the key `{'` or `'.join(self._text_keys())}`, but has not; see --text-key")

    def _text_keys(self) -> tuple[str, ...]:
        return (self.text_key,) if isinstance(self.text_key, str) else self.text_key

    def _is_selected(self, record: Any) -> bool:
        is_kept = all((key, _value_as_text(record, key)) in self.keep for key, _ in self.keep)
        return is_kept and not any((key, _value_as_text(record, key)) in self.drop for key, _ in self.drop)


def parse_conditions(field: str, texts: Sequence[str]) -> tuple[Condition, ...]:
    """`KEY=VALUE` texts as pairs; FieldError for one without `=`."""
    for text in texts:
        if "=" not in text:
            raise FieldError(field, "be KEY=VALUE, like meta.pile_set_name=ArXiv", got=text)
    return tuple((key, value) for key, _, value in (text.partition("=") for text in texts))


def _value_as_text(record: Any, key: str) -> str | None:
    """The value of `key` as text; None if the record lacks it, so that a filter never fails."""
    try:
        return str(_nested_value(record, key))
    except KeyError:
        return None


def _nested_value(record: Any, key: str) -> Any:
    """The value of a key or of a dotted path of keys; KeyError if there is none."""
    if not isinstance(record, Mapping):
        raise KeyError(key)
    if key in record:
        return record[key]
    head, dot, rest = key.partition(".")
    if not dot or head not in record:
        raise KeyError(key)
    return _nested_value(record[head], rest)


@dataclass
class ParsedChunk:
    """The documents of a chunk, and the records that did not become one."""

    texts: list[str] = field(default_factory=list)
    """The documents' texts, none of them empty."""

    empty_locations: list[str] = field(default_factory=list)
    """`FILE:LINE` of each record without text."""

    errors: list[str] = field(default_factory=list)
    """A sentence that begins with `FILE:LINE` for each record that could not be read."""

    num_filtered: int = 0
    """Records that the selection filters out."""

    def require_texts(self) -> list[str]:
        """The texts; DataError if a record could not be read."""
        if self.errors:
            raise DataError(self.errors[0])
        return self.texts

    def add(self, location: str, text: str | None) -> None:
        """Adds the text of the record at `location` (`FILE:LINE`); None if it is filtered out."""
        if text is None:
            self.num_filtered += 1
        elif not text or text.isspace():
            self.empty_locations.append(location)
        else:
            self.texts.append(text)


@dataclass(frozen=True)
class Chunk(ABC):
    """A part of an input: split off cheaply in the main process, parsed in any process."""

    path: str
    first_record: int
    """Number of its first record in the input, from 1."""

    data: bytes
    selection: Selection
    disk_bytes: int
    """Bytes of the file on disk that were read for it."""

    @abstractmethod
    def parse(self) -> ParsedChunk:
        """Its documents."""

    def _parse_records(self, records: Iterable[tuple[int, Any]], get_text: Callable[[Any], str | None]) -> ParsedChunk:
        """Parses (number, record) pairs; `get_text` returns None for a record that is filtered out."""
        parsed = ParsedChunk()
        for number, record in records:
            try:
                parsed.add(f"{self.path}:{number}", get_text(record))
            except InvalidRecord as error:
                parsed.errors.append(f"`{self.path}:{number}` {error}.")
        return parsed


class JsonLines(Chunk):
    """Whole lines of a `.jsonl` file, one JSON object each; blank lines are ignored."""

    def parse(self) -> ParsedChunk:
        """One document per line."""
        lines = enumerate(io.BytesIO(self.data), self.first_record)  # lazily: a list would copy the block
        return self._parse_records(((number, line) for number, line in lines if line.strip()), self._get_text)

    def _get_text(self, line: bytes) -> str | None:
        try:
            record = orjson.loads(line.removesuffix(b"\n"))
        except orjson.JSONDecodeError as error:
            raise InvalidRecord(f"must be one JSON object in UTF-8, but is not ({error})") from None
        return self.selection.text(record)


class TableRows(Chunk):
    """Rows of a table (Parquet, Arrow), the needed columns only, in Arrow's stream format."""

    def parse(self) -> ParsedChunk:
        """One document per row."""
        import pyarrow.ipc

        table = pyarrow.ipc.open_stream(self.data).read_all()
        try:
            rows = table.to_pylist()
        except UnicodeDecodeError:  # in some row: the others are documents
            rows = [table.slice(row, 1) for row in range(table.num_rows)]
        return self._parse_records(enumerate(rows, self.first_record), self._get_text)

    def _get_text(self, row: Any) -> str | None:
        """`row`: a dict, or a table of one row."""
        try:
            return self.selection.text(row if isinstance(row, dict) else row.to_pylist()[0])
        except UnicodeDecodeError as error:
            raise InvalidRecord(f"must be UTF-8 text, but is not ({error.reason})") from None


class TextLines(Chunk):
    """Whole lines of a `.txt` file, one document each."""

    def parse(self) -> ParsedChunk:
        """One document per line; those of blank lines are empty."""
        return self._parse_records(enumerate(self.data.split(b"\n"), self.first_record), self._get_text)

    def _get_text(self, line: bytes) -> str:
        try:
            return line.decode().removesuffix("\r")
        except UnicodeDecodeError as error:
            raise InvalidRecord(f"must be UTF-8 text, but is not ({error.reason})") from None


class TextFile(Chunk):
    """A whole `.txt` or `.md` file: one document."""

    def parse(self) -> ParsedChunk:
        """The file's text, without a byte-order mark."""
        parsed = ParsedChunk()
        try:
            parsed.add(self.path, self.data.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            line = self.data.count(b"\n", 0, error.start) + 1
            parsed.errors.append(f"`{self.path}:{line}` must be UTF-8 text, but is not ({error.reason}).")
        return parsed


# Tables (Parquet files, saved Hugging Face datasets), split into chunks of rows.

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
            yield from chunk_batches(path, batches, selection, lambda row: int(row * row_bytes))
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
            yield from chunk_batches(path, slices, selection, lambda row: source.tell())
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


def chunk_batches(
    path: Path | str, batches: Iterable[pa.RecordBatch], selection: Selection, bytes_before: Callable[[int], int]
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
    """Consecutive batches of one schema, in lists of about one block of text each."""
    group = list[Any]()
    for batch in batches:
        if group and batch.schema != group[0].schema:
            yield group
            group = []
        group.append(batch)
        if sum(part.get_total_buffer_size() for part in group) >= BLOCK_BYTES:
            yield group
            group = []
    if group:
        yield group
