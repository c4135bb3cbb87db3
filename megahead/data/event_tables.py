"""Reads tables of events (user, item, time), in batches: Parquet, and text files with delimiters."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from megahead.data.indexed import Array
from megahead.errors import DataError, FieldError
from megahead.wording import did_you_mean

_DELIMITERS = {".csv": ",", ".tsv": "\t", ".inter": "\t"}  # .inter: RecBole's interactions
_COMPRESSIONS = (".gz", ".zst")


class EventColumns(NamedTuple):
    """Names of the columns of a table."""

    user: str
    item: str
    time: str


def read_events(path: Path, columns: EventColumns, dropped: Counter[str], kinds: set[str]) -> Iterator[pa.Table]:
    """Batches of events. Those without user, item or time are left out and counted in `dropped`. `kinds` collects the
    kinds of times of all tables: dates become microseconds, numbers stay as they are. FieldError for a second kind or a
    wrong column, DataError for a table that cannot be read."""
    try:
        for batch in _read_batches(path, columns, dropped):
            user, item = (_as_key(batch, name) for name in (columns.user, columns.item))
            time, batch_kinds = _as_time(batch.column(columns.time), path, columns.time)
            kinds |= batch_kinds
            if len(kinds) > 1:
                rule = "name a column of numbers or of dates, the same in all tables"
                raise FieldError("--time", rule, got=f"both, of which `{path}` has the second")
            events = pa.table({"user": user, "item": item, "time": time})
            for name in events.column_names:
                missing = pc.is_null(events[name])
                dropped[f"without {name}"] += pc.sum(missing).as_py() or 0
                events = events.filter(pc.invert(missing))
            yield events
    except (pa.ArrowException, csv.Error, OSError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"`{path}` must be a readable table, but is not ({reason}); repair or convert it.") from None


def _read_batches(path: Path, columns: EventColumns, dropped: Counter[str]) -> Iterator[pa.RecordBatch]:
    """Batches of the three columns; those of text files are strings."""
    if path.suffix == ".parquet":
        with pyarrow.parquet.ParquetFile(path) as file:
            _require_columns(path, columns, file.schema_arrow.names)
            yield from file.iter_batches(columns=list(columns))
        return
    suffixes = [suffix for suffix in path.suffixes if suffix not in _COMPRESSIONS]
    if not suffixes or suffixes[-1] not in _DELIMITERS:
        endings = ", ".join([*_DELIMITERS, ".parquet"])
        raise FieldError("--table", f"name files that end in {endings}, text files also in .gz or .zst", got=path)

    is_complete = False

    def skip(row: pyarrow.csv.InvalidRow) -> str:
        nonlocal is_complete
        if row.text == _LAST_LINE:
            is_complete = True
        else:
            dropped["with another number of columns"] += 1
        return "skip"

    delimiter = _DELIMITERS[suffixes[-1]]
    _require_columns(path, columns, _header(path, delimiter))
    parse = pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True, invalid_row_handler=skip)
    types = dict.fromkeys(columns, pa.string())
    nulls: dict[str, Any] = {"null_values": [""], "strings_can_be_null": True}
    convert = pyarrow.csv.ConvertOptions(include_columns=list(types), column_types=types, **nulls)
    with pyarrow.csv.open_csv(_FileWithLastLine(path), parse_options=parse, convert_options=convert) as reader:
        yield from reader
    if not is_complete:
        raise pa.ArrowInvalid("the last quotes do not end")


def _header(path: Path, delimiter: str) -> list[str]:
    with pa.input_stream(path) as file:
        lines = io.TextIOWrapper(file, encoding="utf-8-sig", errors="replace", newline="")
        for names in filter(None, csv.reader(lines, delimiter=delimiter)):
            return names
    raise pa.ArrowInvalid("it is empty")


_LAST_LINE = "end of table"


class _FileWithLastLine(io.RawIOBase):
    """A file followed by the line `_LAST_LINE`. After quotes that do not end, pyarrow reads the rest of the file as one
    value, so that it does not report this line."""

    def __init__(self, path: Path) -> None:
        self._parts = [pa.input_stream(path), io.BytesIO(f"\n{_LAST_LINE}\n".encode())]

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        size = 0
        while self._parts and not (size := self._parts[0].readinto(buffer)):
            self._parts.pop(0)
        return size


def _require_columns(path: Path, columns: EventColumns, names: list[str]) -> None:
    """FieldError unless each column is in the table once."""
    for option, name in (("--user", columns.user), ("--item", columns.item), ("--time", columns.time)):
        if names.count(name) != 1 or columns.count(name) != 1:
            rule = f"name a column of its own of `{path}` ({', '.join(names)})"
            raise FieldError(option, rule, got=name, hint=did_you_mean(name, set(names) - {name}))


def _as_key(batch: pa.RecordBatch, name: str) -> pa.Array:
    """A column as strings; numbers that are whole have no decimal point."""
    column = _without_encoding(batch.column(name))
    if pa.types.is_decimal(column.type):
        return pc.replace_substring_regex(column.cast(pa.string()), r"\.0+$", "")
    if pa.types.is_floating(column.type):
        column = pa.array(column.to_numpy(zero_copy_only=False), from_pandas=True).cast(pa.int64())
    if pa.types.is_nested(column.type) or pa.types.is_binary(column.type):
        raise FieldError("--table", f"have text or whole numbers in the column {name}", got=column.type)
    return column.cast(pa.string())


def _without_encoding(column: pa.Array) -> pa.Array:
    """Decodes categories to their values, and casts all types of text to one type of string."""
    column = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
    is_text = pa.types.is_large_string(column.type) or pa.types.is_string_view(column.type)
    return column.cast(pa.string()) if is_text else column


def _as_time(column: pa.Array, path: Path, name: str) -> tuple[pa.Array, set[str]]:
    """(float64, null where there is no finite time; the kinds of times: `number`, `date`)."""
    import pandas as pd

    column = _without_encoding(column)
    if pa.types.is_temporal(column.type):
        return _as_microseconds(column), {"date"}
    if not pa.types.is_string(column.type):
        if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
            raise FieldError("--time", f"name a column of numbers or dates in `{path}`", got=f"{name}: {column.type}")
        return _finite(column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)), {"number"}
    texts = column.to_pandas()
    numbers = pd.to_numeric(texts, errors="coerce").astype("float64")
    dates = pd.to_datetime(texts.where(numbers.isna()), errors="coerce", format="ISO8601", utc=True)
    kinds = {kind for kind, values in (("number", numbers), ("date", dates)) if values.notna().any()}
    microseconds = _as_microseconds(pa.array(dates, from_pandas=True))
    return pc.coalesce(_finite(numbers.to_numpy()), microseconds), kinds


def _as_microseconds(dates: pa.Array) -> pa.Array:
    """float64, rounded where a date has nanoseconds or is centuries away (9999-12-31)."""
    truncated = pc.CastOptions(pa.timestamp("us", getattr(dates.type, "tz", None)), allow_time_truncate=True)
    return dates.cast(options=truncated).cast(pa.int64()).cast(pa.float64(), safe=False)


def _finite(values_N: Array) -> pa.Array:
    """The values, with null for NaN and infinity: quantiles need finite times."""
    return pa.array(values_N, mask=~np.isfinite(values_N))
