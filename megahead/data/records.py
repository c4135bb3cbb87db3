"""Records of text (JSON lines, rows of tables, whole files) as documents: which are wanted, and what lies in them."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from megahead.errors import DataError, FieldError

Condition = tuple[str, str]


class InvalidRecord(Exception):
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
        """The document's text; None for a record that is not wanted. Raises InvalidRecord for a record without text."""
        if (self.keep or self.drop) and not self._wanted(record):
            return None
        if isinstance(record, str):
            return record
        key, text = self._first(record)
        if not isinstance(text, str):
            raise InvalidRecord(f"must have a string in `{key}`, but has {type(text).__name__} instead")
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
        raise InvalidRecord(f"must have the key `{'` or `'.join(self._text_keys())}`, but has not; see --text-key")

    def _text_keys(self) -> tuple[str, ...]:
        return (self.text_key,) if isinstance(self.text_key, str) else self.text_key

    def _wanted(self, record: Any) -> bool:
        kept = all((key, _value(record, key)) in self.keep for key, _ in self.keep)
        return kept and not any((key, _value(record, key)) in self.drop for key, _ in self.drop)


def as_text_key(given: Sequence[str]) -> str | tuple[str, ...]:
    """A key alone as Selection had it before there could be several: folders of `--per-file` hold it so."""
    return given[0] if len(given) == 1 else tuple(given)


def parse_conditions(field: str, given: Sequence[str]) -> tuple[Condition, ...]:
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

    def strict_texts(self) -> list[str]:
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
            except InvalidRecord as problem:
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
            raise InvalidRecord(f"must be one JSON object in UTF-8, but is not ({error})") from None
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
            raise InvalidRecord(f"must be UTF-8 text, but is not ({error.reason})") from None


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
