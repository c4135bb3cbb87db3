"""Turns records of text (JSON lines, rows of tables, whole files) into documents, and reads tables, also of the Hub."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import parse_qsl

import orjson

from megahead.errors import DataError, FieldError

if TYPE_CHECKING:
    import pyarrow as pa  # imported where tables are read: it takes longer than to read a small file of JSON lines
    from datasets import IterableDataset  # imported where it is used: it takes a second

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
    """Key of the text, or several keys, of which the first that is not blank is read."""

    keep: tuple[Condition, ...] = ()
    """(key, value) pairs: a record is kept if, for each key among them, it has one of that key's values."""

    drop: tuple[Condition, ...] = ()
    """(key, value) pairs: a record that has any of them is dropped."""

    splits_text_files: ClassVar[bool] = False
    """Whether each line of a `.txt` file is a document, also of those in archives, and not the whole file."""

    def text(self, record: Any) -> str | None:
        """The document's text; None for a record that is filtered out. InvalidRecord for a record without text."""
        is_kept = all(_meets(record, key, self.keep) for key, _ in self.keep)
        if not is_kept or any(_meets(record, key, self.drop) for key, _ in self.drop):
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
        text_keys = [key for key in keys if key in names or key.split(".")[0] in names] or [keys[0]]
        needed = [*text_keys, *(key for key, _ in self.keep + self.drop)]
        column_by_key = {key: key if key in names else key.split(".")[0] for key in needed}
        for key, column in column_by_key.items():
            if column not in names:
                found, option = ", ".join(names) or "none", "--text-key" if key in text_keys else "--keep and --drop"
                raise DataError(f"`{path}` must have a column for '{key}', but has {found}; see {option}.")
        return list(dict.fromkeys(column_by_key.values()))

    def _find_text(self, record: Any) -> tuple[str, Any]:
        """The first key whose value is a string that is not blank, else the first that the record has; its value."""
        found: tuple[str, Any] | None = None
        for key in self._text_keys():
            with suppress(KeyError):
                value = _nested_value(record, key)
                if isinstance(value, str) and value and not value.isspace():
                    return key, value
                found = found or (key, value)
        if found is None:
            raise InvalidRecord(f"must have the key `{'` or `'.join(self._text_keys())}`, but has not; see --text-key")
        return found

    def _text_keys(self) -> tuple[str, ...]:
        return (self.text_key,) if isinstance(self.text_key, str) else self.text_key


class LineSelection(Selection):
    """A selection with each line of a `.txt` file as a document."""

    splits_text_files = True


def parse_conditions(field: str, texts: Sequence[str]) -> tuple[Condition, ...]:
    """`KEY=VALUE` texts as pairs; FieldError for one without `=`."""
    for text in texts:
        if "=" not in text:
            raise FieldError(field, "be KEY=VALUE, like meta.pile_set_name=ArXiv", got=text)
    return tuple((key, value) for key, _, value in (text.partition("=") for text in texts))


def _meets(record: Any, key: str, conditions: Sequence[Condition]) -> bool:
    """Whether the record has a value of `key` among `conditions`, where true, false and null are spelled as in JSON or
    in Python."""
    try:
        value = _nested_value(record, key)
    except KeyError:
        return False
    is_constant = value is None or isinstance(value, bool)
    return (key, str(value)) in conditions or (is_constant and (key, orjson.dumps(value).decode()) in conditions)


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
class Chunk:
    """A part of an input: split off cheaply in the main process, parsed in any process."""

    path: str
    first_record: int
    """Number of its first record in the input, from 1."""

    data: bytes
    selection: Selection
    disk_bytes: int
    """Bytes of the file on disk that were read for it."""

    def parse(self) -> ParsedChunk:
        """Its documents: one per record."""
        parsed = ParsedChunk()
        for number, record in self._records():
            location = f"{self.path}:{number}"
            try:
                parsed.add(location, self._text(record))
            except InvalidRecord as error:
                parsed.errors.append(f"`{location}` {error}.")
            except UnicodeDecodeError as error:
                parsed.errors.append(f"`{location}` must be UTF-8 text, but is not ({error.reason}).")
        return parsed

    def _records(self) -> Iterable[tuple[int, Any]]:
        """Numbers and records."""
        raise NotImplementedError

    def _text(self, record: Any) -> str | None:
        """The text of a record; None if it is filtered out. InvalidRecord or UnicodeDecodeError if it has none."""
        return self.selection.text(record)


class JsonLines(Chunk):
    """Whole lines of a `.jsonl` file, one JSON object each; blank lines are ignored."""

    def _records(self) -> Iterable[tuple[int, bytes]]:
        lines = enumerate(io.BytesIO(self.data), self.first_record)  # lazily: a list would copy the block
        return ((number, line) for number, line in lines if line.strip())

    def _text(self, record: bytes) -> str | None:
        try:
            value = orjson.loads(record.removesuffix(b"\n"))
        except orjson.JSONDecodeError as error:
            raise InvalidRecord(f"must be one JSON object in UTF-8, but is not ({error})") from None
        return super()._text(value)


class TableRows(Chunk):
    """Rows of a table (Parquet, Arrow), the needed columns only, in Arrow's stream format."""

    def _records(self) -> Iterable[tuple[int, Any]]:
        import pyarrow.ipc

        table = pyarrow.ipc.open_stream(self.data).read_all()
        try:
            return enumerate(table.to_pylist(), self.first_record)
        except UnicodeDecodeError:  # in some row: the others are documents
            return enumerate((table.slice(row, 1) for row in range(table.num_rows)), self.first_record)

    def _text(self, record: Any) -> str | None:
        return super()._text(record if isinstance(record, dict) else record.to_pylist()[0])


class TextLines(Chunk):
    """Whole lines of a `.txt` file, one document each; a blank line is a document without text."""

    def _records(self) -> Iterable[tuple[int, bytes]]:
        return enumerate(self.data.split(b"\n"), self.first_record)

    def _text(self, record: bytes) -> str | None:
        return super()._text(record.decode().removesuffix("\r"))


class TextFile(Chunk):
    """A whole `.txt` or `.md` file: one document."""

    def parse(self) -> ParsedChunk:
        """The file's text, without a byte-order mark."""
        parsed = ParsedChunk()
        try:
            parsed.add(self.path, self._text(self.data.decode("utf-8-sig")))
        except UnicodeDecodeError as error:
            line = self.data.count(b"\n", 0, error.start) + 1
            parsed.errors.append(f"`{self.path}:{line}` must be UTF-8 text, but is not ({error.reason}).")
        return parsed


# Tables (Parquet files, saved Hugging Face datasets), split into chunks of rows.

ROWS_PER_READ = 64
STATE_FILE = "state.json"
DATASET_DICT_FILE = "dataset_dict.json"


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
    if (folder / DATASET_DICT_FILE).is_file():
        splits = orjson.loads((folder / DATASET_DICT_FILE).read_bytes())["splits"]
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
                writer.write_batch(batch)  # for a slice, this writes only its rows
        end = first + sum(map(len, group))
        disk_bytes = bytes_before(end) - position
        yield TableRows(str(path), first + 1, sink.getvalue().to_pybytes(), selection, disk_bytes)
        first, position = end, position + disk_bytes


def _group_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    """Consecutive batches of one schema, in lists of about one block of text each."""
    group, size = list[Any](), 0
    for batch in batches:
        if group and (size >= BLOCK_BYTES or batch.schema != group[0].schema):
            yield group
            group, size = [], 0
        group.append(batch)
        size += batch.nbytes
    if group:
        yield group


# Datasets of the Hugging Face Hub, streamed: `hf://datasets/OWNER/NAME[/CONFIG]?split=SPLIT[&revision=REVISION]`. A
# split is read at one commit, in the shards (files) that it has on the Hub. Each shard can be read alone.

HUB_PREFIX = "hf://datasets/"
_COMMIT = re.compile("[0-9a-f]{40}")


def is_hub_url(name: str) -> bool:
    """Whether `name` is the URL of a dataset of the Hub."""
    return name.startswith(HUB_PREFIX)


@dataclass(frozen=True)
class HubSplit:
    """A split of a dataset, at a revision."""

    name: str
    """OWNER/NAME."""

    split: str
    config: str | None = None
    revision: str | None = None
    """A commit, branch or tag; None for the newest commit."""

    @staticmethod
    def parse(url: str) -> HubSplit:
        """The split that a URL names. FieldError for another form."""
        path, _, query = url.removeprefix(HUB_PREFIX).partition("?")
        parts, options = path.strip("/").split("/"), dict(parse_qsl(query, keep_blank_values=True))
        if not 1 <= len(parts) <= 3 or not all(parts) or not options.get("split") or options.keys() - _OPTIONS:
            form = f"{HUB_PREFIX}OWNER/NAME[/CONFIG]?split=SPLIT[&revision=REVISION]"
            raise FieldError("--input", f"be {form}", got=url, hint=f"try {HUB_PREFIX}{path}?split=train")
        config = parts[2] if len(parts) == 3 else None
        return HubSplit("/".join(parts[:2]), options["split"], config, options.get("revision"))

    @property
    def url(self) -> str:
        """What `parse` reads."""
        path = self.name if self.config is None else f"{self.name}/{self.config}"
        revision = "" if self.revision is None else f"&revision={self.revision}"
        return f"{HUB_PREFIX}{path}?split={self.split}{revision}"

    def pin(self) -> HubSplit:
        """The split at the commit that its revision is now. DataError if the Hub does not give it."""
        if self.revision is not None and _COMMIT.fullmatch(self.revision):
            return self
        from huggingface_hub import HfApi

        try:
            return replace(self, revision=HfApi().dataset_info(self.name, revision=self.revision).sha)
        except Exception as error:
            raise self._hub_error(error) from error

    def shard_names(self) -> list[str]:
        """The name of a dataset made of each of its shards, in order. DataError as in `open`."""
        parts = [self.name.rpartition("/")[2], self.config, self.split]
        name = "-".join(re.sub(r"[^\w.-]", "_", part) for part in parts if part)
        count = self.open().num_shards
        return [f"{name}-{index:05}-of-{count:05}" for index in range(count)]

    def shard_url(self, index: int, count: int) -> str:
        """The address of one of its `count` shards in messages and manifests."""
        return f"{self.url}#{index + 1}-of-{count}"

    def chunk_shard(self, index: int, count: int, _: Path, selection: Selection) -> Iterator[Chunk]:
        """The rows of a shard, a few at a time, with the columns that `selection` needs (`_`: the path of other
        inputs). DataError if it lacks such a column, or the stream ends early."""
        url = self.shard_url(index, count)
        try:
            dataset = self.open().shard(count, index)
            names = dataset.column_names or list(next(iter(dataset), {}))
            dataset = dataset.select_columns(selection.columns(url, names)) if names else dataset
            tables = dataset.with_format("arrow").iter(ROWS_PER_READ)
            batches = (batch for table in tables for batch in table.to_batches())
            yield from chunk_batches(url, batches, selection, lambda row: 0)
        except DataError:
            raise
        except Exception as error:
            raise self._hub_error(error) from error

    def open(self) -> IterableDataset:
        """The stream of its examples; DataError if the Hub does not give it, or has no such config or split."""
        from datasets import load_dataset_builder
        from pyarrow.dataset import ParquetFragmentScanOptions

        try:
            builder = load_dataset_builder(self.name, self.config, revision=self.revision)
            if builder.name == "parquet":  # by default it keeps all that it has read of a file in memory
                options = ParquetFragmentScanOptions(pre_buffer=False, use_buffered_stream=True, buffer_size=8 << 20)
                builder.config.fragment_scan_options, builder.config.batch_size = options, ROWS_PER_READ
            return builder.as_streaming_dataset(split=self.split)
        except Exception as error:  # of the libraries below, each with errors of its own
            raise self._hub_error(error) from error

    def _hub_error(self, error: Exception) -> DataError:
        lines = str(error).strip().splitlines()
        reason = (lines[0] if lines else type(error).__name__).rstrip(".:")
        fix = next((fix for words, fix in _FIXES if re.search(words, str(error), re.IGNORECASE)), _OTHER_FIX)
        return DataError(f"`{self.url}` must be a dataset that the Hub gives, but is not ({reason}); {fix}.")


_OPTIONS = {"split", "revision"}
_OTHER_FIX = "check the name and the network, and call again"
_FIXES = (
    ("gated", "accept its terms on its page, and log in with `hf auth login`"),
    ("offline", "unset HF_HUB_OFFLINE, or give files"),
    ("config", "name one as OWNER/NAME/CONFIG"),
    ("split", "name one of these as ?split="),
    ("not found|404|doesn't exist|401", "check the name, and for a private one log in with `hf auth login`"),
)
