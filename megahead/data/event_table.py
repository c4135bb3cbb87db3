"""Reads tables of events: a user met an item at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megahead.errors import DataError, FieldError
from megahead.wording import did_you_mean

if TYPE_CHECKING:
    import pyarrow as pa

_DELIMITERS = {".csv": ",", ".tsv": "\t", ".inter": "\t"}
_COMPRESSIONS = (".gz", ".zst")


@dataclass(frozen=True)
class EventColumns:
    """Names of the columns of a table."""

    user: str
    item: str
    time: str

    def names(self) -> list[str]:
        """The names in the order user, item, time."""
        return [self.user, self.item, self.time]


def read_events(path: Path, columns: EventColumns, dropped: Counter[str]) -> Iterator[pa.Table]:
    import pyarrow as pa
    import pyarrow.compute as pc

    kinds: set[str] = set()
    try:
        for batch in _read_batches(path, columns, dropped):
            user, item = (_as_key(batch, name) for name in (columns.user, columns.item))
            time, batch_kinds = _as_time(batch.column(columns.time), path, columns.time)
            kinds |= batch_kinds
            if len(kinds) > 1:
                got = "numbers and dates"
                raise FieldError("--time", f"name a column of numbers or of dates in `{path}`", got=got)
            events = pa.table({"user": user, "item": item, "time": time})
            for name in events.column_names:
                missing = pc.is_null(events[name])
                dropped[f"without {name}"] += pc.sum(missing).as_py() or 0
                events = events.filter(pc.invert(missing))
            yield events
    except (pa.ArrowException, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"`{path}` must be a readable table, but is not ({reason}); repair or convert it.") from None


def _read_batches(path: Path, columns: EventColumns, dropped: Counter[str]) -> Iterator[pa.RecordBatch]:
    """Batches of the three columns; those of text files are strings."""
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    if path.suffix == ".parquet":
        with pyarrow.parquet.ParquetFile(path) as file:
            _require_columns(path, columns, file.schema_arrow.names)
            yield from file.iter_batches(columns=columns.names())
        return
    suffixes = [suffix for suffix in path.suffixes if suffix not in _COMPRESSIONS]
    if not suffixes or suffixes[-1] not in _DELIMITERS:
        endings = ", ".join([*_DELIMITERS, ".parquet"])
        raise FieldError("--table", f"name files that end in {endings}, text files also in .gz or .zst", got=path)

    def count(_: object) -> str:
        dropped["with another number of columns"] += 1
        return "skip"

    parse = pyarrow.csv.ParseOptions(delimiter=_DELIMITERS[suffixes[-1]], invalid_row_handler=count)
    types = dict.fromkeys(columns.names(), pa.string())
    convert = pyarrow.csv.ConvertOptions(column_types=types, null_values=[""], strings_can_be_null=True)
    with pyarrow.csv.open_csv(pa.input_stream(path), parse_options=parse, convert_options=convert) as reader:
        _require_columns(path, columns, reader.schema.names)
        for batch in reader:
            yield batch.select(columns.names())


def _require_columns(path: Path, columns: EventColumns, names: list[str]) -> None:
    """FieldError unless each column is in the table once."""
    for option, name in (("--user", columns.user), ("--item", columns.item), ("--time", columns.time)):
        if names.count(name) != 1 or columns.names().count(name) != 1:
            rule = f"name a column of its own of `{path}` ({', '.join(names)})"
            raise FieldError(option, rule, got=name, hint=did_you_mean(name, set(names) - {name}))


def _as_key(batch: pa.RecordBatch, name: str) -> pa.Array:
    """A column as strings; numbers that are whole have no decimal point."""
    import pyarrow as pa

    column = batch.column(name)
    if pa.types.is_floating(column.type):
        column = column.cast(pa.int64())
    if pa.types.is_nested(column.type) or pa.types.is_binary(column.type):
        raise FieldError("--table", f"have text or whole numbers in the column {name}", got=column.type)
    return column.cast(pa.string())


def _as_time(column: pa.Array, path: Path, name: str) -> tuple[pa.Array, set[str]]:
    """(float64, null where there is no time; the kinds of times: `number`, `date`)."""
    import pandas as pd
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_temporal(column.type):
        return column.cast(pa.timestamp("us")).cast(pa.int64()).cast(pa.float64()), {"date"}
    if not pa.types.is_string(column.type):
        if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
            raise FieldError("--time", f"name a column of numbers or dates in `{path}`", got=f"{name}: {column.type}")
        return pa.array(column.cast(pa.float64()).to_numpy(zero_copy_only=False), from_pandas=True), {"number"}
    texts = column.to_pandas()
    numbers = pd.to_numeric(texts, errors="coerce").astype("float64")
    dates = pd.to_datetime(texts.where(numbers.isna()), errors="coerce", format="ISO8601", utc=True)
    kinds = {kind for kind, values in (("number", numbers), ("date", dates)) if values.notna().any()}
    microseconds = pa.array(dates, pa.timestamp("us", "UTC"), from_pandas=True).cast(pa.int64()).cast(pa.float64())
    return pc.coalesce(pa.array(numbers, from_pandas=True), microseconds), kinds
