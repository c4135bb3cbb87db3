"""Pieces of an input: cut cheaply in the main process, parsed in any process. Each is picklable and knows its position
in the input, for error messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from megahead.corpus.selection import Selection, Unfit
from megahead.errors import DataError


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


class Chunk(Protocol):
    """A piece of an input that becomes documents."""

    @property
    def consumed(self) -> int:
        """Bytes of the file on disk that were read for it."""

    def parse(self) -> Parsed:
        """Its documents."""


@dataclass(frozen=True)
class JsonLines:
    """Whole lines of a `.jsonl` file, one JSON object each; blank lines are ignored."""

    path: str
    first_line: int
    block: bytes
    selection: Selection
    consumed: int

    def parse(self) -> Parsed:
        """One document per line."""
        lines = enumerate(_lines(self.block), self.first_line)
        return _parse_records(self.path, ((number, line) for number, line in lines if line.strip()), self._text)

    def _text(self, line: bytes) -> str | None:
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise Unfit(f"must be one JSON object in UTF-8, but is not ({error})") from None
        return self.selection.text(record)


@dataclass(frozen=True)
class Rows:
    """Rows of a table (Parquet, Arrow), the wanted columns only, in Arrow's own stream format."""

    path: str
    first_row: int
    stream: bytes
    selection: Selection
    consumed: int

    def parse(self) -> Parsed:
        """One document per row."""
        import pyarrow.ipc  # here, because JSON lines, the common case, do not need it

        table = pyarrow.ipc.open_stream(self.stream).read_all()
        try:
            rows = table.to_pylist()
        except UnicodeDecodeError:  # somewhere
            rows = [table.slice(row, 1) for row in range(table.num_rows)]
        return _parse_records(self.path, enumerate(rows, self.first_row), self._text)

    def _text(self, row: Any) -> str | None:
        """Of a row, or of a table that is one row."""
        try:
            return self.selection.text(row if isinstance(row, dict) else row.to_pylist()[0])
        except UnicodeDecodeError as error:
            raise Unfit(f"must be UTF-8 text, but is not ({error.reason})") from None


@dataclass(frozen=True)
class TextFile:
    """A whole `.txt` file: one document."""

    path: str
    data: bytes
    consumed: int

    def parse(self) -> Parsed:
        """The file's text, without a byte-order mark."""
        parsed = Parsed()
        try:
            parsed.add(self.path, self.data.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            line = self.data.count(b"\n", 0, error.start) + 1
            parsed.broken.append(f"`{self.path}:{line}` must be UTF-8 text, but is not ({error.reason}).")
        return parsed


def _parse_records(path: str, records: Iterable[tuple[int, Any]], read: Callable[[Any], str | None]) -> Parsed:
    parsed = Parsed()
    for number, record in records:
        try:
            parsed.add(f"{path}:{number}", read(record))
        except Unfit as problem:
            parsed.broken.append(f"`{path}:{number}` {problem}.")
    return parsed


def _lines(block: bytes) -> Iterator[bytes]:
    """The lines one by one: a list of them would hold the block twice."""
    start = 0
    while (end := block.find(b"\n", start)) >= 0:
        yield block[start:end]
        start = end + 1
    yield block[start:]
