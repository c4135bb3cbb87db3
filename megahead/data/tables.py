"""Splits tables (Parquet files, saved Hugging Face datasets) into chunks of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from megahead.data.records import BLOCK_BYTES, Chunk, Selection, TableRows
from megahead.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa  # imported where tables are read: it takes longer than to read a small file of JSON lines

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
