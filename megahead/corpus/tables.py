"""Parquet files and saved Hugging Face datasets (folders of Arrow streams) cut into chunks of rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from megahead.corpus import decompression
from megahead.corpus.chunks import Chunk, Rows
from megahead.corpus.selection import Selection
from megahead.errors import DataError

ROWS_AT_ONCE = 64
STATE = "state.json"
SPLITS = "dataset_dict.json"


def cut_parquet(path: Path, selection: Selection) -> Iterator[Chunk]:
    """The rows of a `.parquet` file; reads only the columns that are needed, a few pages at a time."""
    try:
        with pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
            columns = _columns(path, selection, file.schema_arrow.names)
            batches = file.iter_batches(ROWS_AT_ONCE, columns=columns, use_threads=False)
            yield from _chunks(path, batches, selection, path.stat().st_size / max(file.metadata.num_rows, 1))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"`{path}` must be a readable Parquet file, but is not ({error}).") from error


def cut_arrow(path: Path, selection: Selection) -> Iterator[Chunk]:
    """The rows of an `.arrow` file in the stream format that `Dataset.save_to_disk` writes."""
    try:
        with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as stream:
            columns = _columns(path, selection, stream.schema.names)
            batches = (batch.select(columns) for batch in stream)
            slices = (batch.slice(at, ROWS_AT_ONCE) for batch in batches for at in range(0, len(batch), ROWS_AT_ONCE))
            reported_bytes = 0
            for chunk in _chunks(path, slices, selection, 0.0):
                position = source.tell()
                yield Rows(chunk.path, chunk.first_row, chunk.stream, selection, position - reported_bytes)
                reported_bytes = position
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"`{path}` must be a readable Arrow stream, but is not ({error}).") from error


def saved_dataset_files(folder: Path) -> list[Path]:
    """The Arrow files of a saved Hugging Face dataset, in order. DataError for any other folder."""
    if (folder / SPLITS).is_file():
        splits = orjson.loads((folder / SPLITS).read_bytes())["splits"]
        raise DataError(f"`{folder}` must be one split of a saved dataset, but holds {', '.join(splits)}; name one.")
    if not (folder / STATE).is_file():
        raise DataError(
            f"`{folder}` must be a file or a saved Hugging Face dataset, but is a folder without {STATE}; "
            f"for the files in it give a pattern in quotes like '{folder}/*.jsonl'."
        )
    state = orjson.loads((folder / STATE).read_bytes())
    if state.get("_indices_data_files"):
        raise DataError(f"`{folder}` must be saved flat, but has an index mapping; save it after flatten_indices().")
    return [folder / file["filename"] for file in state["_data_files"]]


def _columns(path: Path, selection: Selection, names: list[str]) -> list[str]:
    try:
        return selection.columns(names)
    except KeyError as key:
        raise DataError(f"`{path}` must have a column for {key}, but has {', '.join(names)}; see --text-key.") from None


def _chunks(path: Path, batches: Iterable[pa.RecordBatch], selection: Selection, row_bytes: float) -> Iterator[Rows]:
    """Joins batches to chunks of about one block of text each."""
    first, waiting = 0, list[pa.RecordBatch]()
    for batch in batches:
        waiting.append(batch)
        if sum(part.get_total_buffer_size() for part in waiting) >= decompression.BLOCK_BYTES:
            yield _rows(path, first, waiting, selection, row_bytes)
            first, waiting = first + sum(map(len, waiting)), []
    if waiting:
        yield _rows(path, first, waiting, selection, row_bytes)


def _rows(path: Path, first: int, batches: list[pa.RecordBatch], selection: Selection, row_bytes: float) -> Rows:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)  # writes only the rows of a slice, not the whole batch that it is cut from
    last = first + sum(map(len, batches))
    consumed = int(last * row_bytes) - int(first * row_bytes)
    return Rows(str(path), first + 1, sink.getvalue().to_pybytes(), selection, consumed)
