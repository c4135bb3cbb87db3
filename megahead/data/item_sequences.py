"""Turns a table of events (user, item, time) into indexed datasets of item ids: a document per user, in time order.

Events are spread over files by user, so that one file at a time is sorted in memory.
"""

from __future__ import annotations

import tempfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from megahead.data.event_tables import EventColumns, read_events
from megahead.data.indexed import Array, IndexedDataset
from megahead.data.writer import NO_PROGRESS, IndexedDatasetWriter, ProgressBar
from megahead.errors import DataError, FieldError
from megahead.files import atomic_path
from megahead.wording import format_names

Split = Literal["last", "time"]
END_ID = 0
PARTITION_BYTES = 64 << 20
MAX_PARTITIONS = 256
HELD_OUT_FROM = 0.8, 0.9
"""Quantiles of all times. The split `time` holds out events from the first on for validation, from the second for
test."""

_MAX_SAMPLED_TIMES = 1 << 24


@dataclass
class EventReport:
    """Counts of what was read and written."""

    events: int = 0
    """Events in the documents of all users, before the split."""

    users: int = 0
    items: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """Rows that were left out, by reason."""

    documents: Counter[str] = field(default_factory=Counter)
    """Documents by dataset: `train`, `validation`, `test`."""


class ItemVocabulary:
    """Items with their ids: id 0 ends a document, ids 1, 2, ... are the items from the most to the least frequent.

    `keys`: the items as strings, in this order; `counts`: their events.
    """

    def __init__(self, keys: pa.Array, counts: Array) -> None:
        self.keys, self.counts = keys, counts

    @staticmethod
    def from_counts(table: pa.Table, min_count: int) -> ItemVocabulary:
        """The items of `table` (key, count) that occur at least `min_count` times; ties are sorted by key."""
        table = table.sort_by([("count", "descending"), ("key", "ascending")])
        counts = table["count"].to_numpy()
        size = int(np.searchsorted(-counts, -min_count, side="right"))
        return ItemVocabulary(table["key"].combine_chunks()[:size], counts[:size])

    @staticmethod
    def load(path: Path) -> ItemVocabulary:
        """Reads an `items.json`; DataError for another file."""
        try:
            entries = orjson.loads(path.read_bytes())
            if [entry["id"] for entry in entries] != list(range(len(entries))):
                raise ValueError("ids are not 0, 1, 2, ...")
            keys = pa.array([entry["key"] for entry in entries[1:]], pa.string())
            return ItemVocabulary(keys, np.array([entry["count"] for entry in entries[1:]], np.int64))
        except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
            raise DataError(
                f"`{path}` must be an items.json, but is not ({error}); make it by preprocessing."
            ) from None

    def write(self, path: Path) -> None:
        """Writes a JSON list of {id, key, count}, an entry a line; the key of id 0 is null."""
        entries = enumerate(zip([None, *self.keys.to_pylist()], [0, *self.counts.tolist()], strict=True))
        lines = [orjson.dumps({"id": id_, "key": key, "count": count}) for id_, (key, count) in entries]
        path.write_bytes(b"[" + b",\n".join(lines) + b"]\n")

    def __len__(self) -> int:
        """The number of ids, with id 0."""
        return len(self.keys) + 1

    def ids(self, keys: Any) -> Array:
        """[N] int64: the ids of `keys`, 0 for a key without one."""
        positions = pc.index_in(keys, value_set=self.keys).fill_null(-1)
        ids: Array = positions.to_numpy(zero_copy_only=False).astype(np.int64) + 1
        return ids


def items_path(prefix: str | Path) -> Path:
    """The vocabulary beside the datasets of `prefix`."""
    return Path(f"{prefix}-items.json")


def preprocess_events(
    paths: Sequence[Path],
    columns: EventColumns,
    output: str | Path,
    *,
    split: Split = "last",
    min_count: int = 1,
    vocabulary: ItemVocabulary | None = None,
    progress: ProgressBar = NO_PROGRESS,
) -> EventReport:
    """Writes `OUTPUT`, `OUTPUT-validation` and `OUTPUT-test` (a document per user) and `OUTPUT-items.json`.

    The last item of each held-out document is to be predicted from those before it. Split `last`: the test document is
    the user's whole sequence, the validation document lacks its last item and the training document its last two; users
    with fewer than three events are for training only. Split `time`: the first 80 % of all events are for training;
    a user's first event from 80 to 90 % (after 90 %) ends the validation (test) document.

    min_count: drops items with fewer events. vocabulary: keeps the ids of an earlier one, whatever the items' events;
    items without an id are dropped. Rows without user, item or time, repeated rows, and training documents of a single
    event are dropped, too; the report counts them. Memory: the events of 64 MB of input (above 16 GB, of a 256th of
    it), and the items. FieldError for both options, FieldError or DataError for a table that cannot be read.
    """
    if vocabulary is not None and min_count > 1:
        hint = "all its items keep their ids"
        raise FieldError("--min-count", "be left out with --items", got=min_count, hint=hint)
    sizes = [_file_bytes(path) for path in paths]
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=Path(output).parent) as folder:
        partitions = _Partitions(Path(folder), sum(sizes))
        report, time_sample = EventReport(), _TimeSample()
        progress.start(sum(sizes))
        kinds: set[str] = set()
        for path, size in zip(paths, sizes, strict=True):
            for events in read_events(path, columns, report.dropped, kinds):
                partitions.write(events)
                time_sample.add(events["time"].to_numpy())
            progress.advance(size, size)
        partitions.close()
        vocabulary = vocabulary or ItemVocabulary.from_counts(_count_items(partitions), min_count)
        report.items = len(vocabulary) - 1
        cut_times = time_sample.quantiles(HELD_OUT_FROM) if split == "time" else None
        _write_datasets(
            str(output), partitions, vocabulary, cut_times, report, format_names(path.name for path in paths)
        )
    return report


def _file_bytes(path: Path) -> int:
    if not path.is_file():
        raise DataError(f"`{path}` must be a table, but there is no such file; check the path.")
    return path.stat().st_size


# Sorting: all events of a user are in one file, and one file at a time is sorted in memory.


@dataclass(frozen=True)
class _Sequences:
    """The events of some users, each user's in time order."""

    keys: Any
    """[N] strings: items."""

    times: Array
    """[N] float64."""

    starts: Array
    """[U + 1]: the first event of each user, then N."""

    num_repeated: int


class _Partitions:
    """Files of events: all events of a user are in one of them, in the order of the table."""

    def __init__(self, folder: Path, table_bytes: int) -> None:
        count = min(MAX_PARTITIONS, 1 + table_bytes // PARTITION_BYTES)
        self._paths = [folder / f"{number}.arrow" for number in range(count)]
        self._writers: dict[int, pa.RecordBatchStreamWriter] = {}

    def write(self, events: pa.Table) -> None:
        """Appends events (user, item, time)."""
        users = events["user"].combine_chunks().dictionary_encode()
        hashes = np.array([zlib.crc32(user.as_py().encode()) for user in users.dictionary], np.int64)
        partition_N = (hashes % len(self._paths))[users.indices.to_numpy()] if len(users) else np.zeros(0, np.int64)
        for number in np.unique(partition_N).tolist():
            part = events.take(np.flatnonzero(partition_N == number))
            if number not in self._writers:
                self._writers[number] = pa.ipc.new_stream(self._paths[number], part.schema)
            self._writers[number].write_table(part)

    def close(self) -> None:
        """Completes the files."""
        for writer in self._writers.values():
            writer.close()

    def __iter__(self) -> Iterator[_Sequences]:
        """The sequences in each file; repeated events (same user, item and time) are removed."""
        for number in sorted(self._writers):
            with pa.memory_map(str(self._paths[number])) as file:
                yield _sort(pa.ipc.open_stream(file).read_all())


def _sort(table: pa.Table) -> _Sequences:
    user_N, item_N = (table[name].combine_chunks().dictionary_encode().indices.to_numpy() for name in ("user", "item"))
    times_N = table["time"].to_numpy()
    order_N = np.lexsort((item_N, times_N, user_N))  # stable: among equals the first row is first
    is_equal = [column[order_N][1:] == column[order_N][:-1] for column in (user_N, times_N, item_N)]
    kept_N = np.sort(order_N[np.concatenate([[True], ~np.logical_and.reduce(is_equal)])])
    order_N = kept_N[np.lexsort((times_N[kept_N], user_N[kept_N]))]
    starts = np.flatnonzero(np.diff(user_N[order_N], prepend=-1))
    num_repeated = len(user_N) - len(order_N)
    return _Sequences(table["item"].take(order_N), times_N[order_N], np.append(starts, len(order_N)), num_repeated)


def _count_items(partitions: Iterable[_Sequences]) -> pa.Table:
    """(key, count) of each item."""
    total = pa.table({"key": pa.array([], pa.string()), "count": pa.array([], pa.int64())})
    for sequences in partitions:
        ones = pa.table({"key": sequences.keys, "count": np.ones(len(sequences.times), np.int64)})
        total = pa.concat_tables([total, ones]).group_by("key").aggregate([("count", "sum")])
        total = total.rename_columns({"count_sum": "count"}).select(["key", "count"])
    return total


class _TimeSample:
    """Every k-th time of the table, at most 16 million, for quantiles."""

    def __init__(self) -> None:
        self._parts: list[Array] = []
        self._stride, self._count = 1, 0

    def add(self, times: Array) -> None:
        """Adds every k-th time; k doubles whenever there are too many."""
        self._parts.append(times[:: self._stride])
        self._count += len(self._parts[-1])
        if self._count > _MAX_SAMPLED_TIMES:
            self._parts, self._stride = [np.concatenate(self._parts)[::2]], 2 * self._stride
            self._count = len(self._parts[0])

    def quantiles(self, shares: Sequence[float]) -> tuple[float, float]:
        """The quantiles of the times at `shares`; 0 without events."""
        times = np.concatenate([*self._parts, np.zeros(0)])
        lower, upper = np.quantile(times, shares) if len(times) else (0.0, 0.0)
        return float(lower), float(upper)


# Writing.


def _write_datasets(
    output: str,
    partitions: Iterable[_Sequences],
    vocabulary: ItemVocabulary,
    cut_times: tuple[float, float] | None,
    report: EventReport,
    source: str,
) -> None:
    prefixes = {"train": output, "validation": f"{output}-validation", "test": f"{output}-test"}
    open_writer = partial(IndexedDatasetWriter, vocab_size=len(vocabulary), end_token=END_ID, source=source)
    with atomic_path(items_path(output)) as items_file, ExitStack() as datasets:
        vocabulary.write(items_file)
        writers = {name: datasets.enter_context(open_writer(prefix)) for name, prefix in prefixes.items()}
        for sequences in partitions:
            report.dropped["repeated"] += sequences.num_repeated
            ids_N, starts, times_N = _without_unknown(sequences, vocabulary, report)
            for name, (first, end) in _split(starts, times_N, cut_times, report).items():
                lengths = end - first  # of documents, before each is closed by the end id
                ends = np.cumsum(lengths)
                positions = np.arange(int(lengths.sum())) + np.repeat(end - ends, lengths)
                writers[name].add_documents(np.insert(ids_N[positions], ends, END_ID), lengths + 1)
                report.documents[name] += len(lengths)
        if missing := [name for name in prefixes if not report.documents[name]]:
            lost = "".join(f", {count:,} {reason}" for reason, count in report.dropped.items() if count)
            got = f"{report.events:,} events of {report.users:,} users{lost}, which leave none"
            hint = "`last` needs users with four events, `time` with two before 80 % of all, one up to 90 %, one later"
            raise FieldError("--split", f"leave a sequence for {missing[0]}", got=got, hint=hint)


def _without_unknown(
    sequences: _Sequences, vocabulary: ItemVocabulary, report: EventReport
) -> tuple[Array, Array, Array]:
    """(ids [N], starts [U + 1], times [N]) without events whose item has no id, and users with only such events."""
    ids_N = vocabulary.ids(sequences.keys)
    has_id_N = ids_N != END_ID
    report.dropped["of items without an id"] += int((~has_id_N).sum())
    starts = np.concatenate([[0], np.cumsum(has_id_N)])[sequences.starts]
    starts = np.append(starts[:-1][np.diff(starts) > 0], starts[-1])
    report.events, report.users = report.events + int(has_id_N.sum()), report.users + len(starts) - 1
    return ids_N[has_id_N], starts, sequences.times[has_id_N]


def _split(
    starts: Array, times_N: Array, cut_times: tuple[float, float] | None, report: EventReport
) -> dict[str, tuple[Array, Array]]:
    """(first event, end) of each document of each dataset. `cut_times`: the times at HELD_OUT_FROM; None: split
    `last`."""
    first, end = starts[:-1], starts[1:]
    size = end - first
    if cut_times is None:
        is_long = size > 2
        ends = {"train": np.where(is_long, end - 2, end), "validation": end - 1, "test": end}
        is_held_out = {"validation": is_long, "test": is_long}
    else:
        validation_start, test_start = (np.diff(np.append(0, np.cumsum(times_N < cut))[starts]) for cut in cut_times)
        ends = {"train": first + validation_start}
        ends |= {"validation": first + validation_start + 1, "test": first + test_start + 1}
        is_held_out = {
            "validation": (validation_start > 0) & (test_start > validation_start),
            "test": (test_start > 0) & (size > test_start),
        }
    is_document = {"train": ends["train"] - first > 1, **is_held_out}
    report.dropped["alone in a user's training document"] += int((ends["train"] - first == 1).sum())
    return {name: (first[is_document[name]], ends[name][is_document[name]]) for name in ends}


# Reading back.


def read_sequences(file: Path, limit: int | None = None) -> list[Array]:
    """Reads the first `limit` documents of an indexed dataset (its `.idx`), without their end id.

    DataError for a document of fewer than two items.
    """
    dataset = IndexedDataset(file.with_suffix(""))
    count = dataset.num_documents if limit is None else min(limit, dataset.num_documents)
    sequences = [ids[ids != END_ID] for ids in (dataset.document(number) for number in range(count))]
    for number, ids in enumerate(sequences):
        if len(ids) < 2:
            raise DataError(
                f"`{file}` must hold sequences of two items at least, but document {number} has {len(ids)}."
            )
    return sequences
