"""Tables of events become the sequences that a few lines of Python make of them, whatever the format and the split."""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megahead.data import item_sequences
from megahead.data.event_tables import EventColumns
from megahead.data.indexed import IndexedDataset
from megahead.data.item_sequences import (
    END_ID,
    EventReport,
    ItemVocabulary,
    items_path,
    preprocess_events,
)
from megahead.errors import DataError, FieldError, UserError

Event = tuple[int, int, int]
COLUMNS = EventColumns("user", "item", "time")


def made_events(count: int = 600) -> list[Event]:
    """(user, item, time) in random order: equal times, repeated rows, users of one to many events."""
    draw = random.Random(0)
    events = [
        (int(draw.expovariate(0.02)), int(draw.expovariate(0.2)), 1_000_000_000 + draw.randrange(300))
        for _ in range(count)
    ]
    return events + events[:7]


def write(folder: Path, kind: str, events: Iterable[Event]) -> Path:
    path = folder / f"events.{kind}"
    rows = list(events)
    if kind == "parquet":
        user, item, time = (list(column) for column in zip(*rows, strict=True))
        times = pa.array(time, pa.int64()).cast(pa.timestamp("s"))
        pq.write_table(pa.table({"n": user, "user": user, "item": item, "time": times}), path)
        return path
    mark = "\t" if "tsv" in kind else ","
    lines = [mark.join(("user", "n", "item", "time")), *(mark.join(map(str, (u, "x", i, t))) for u, i, t in rows)]
    content = "\n".join(lines).encode()
    path.write_bytes(gzip.compress(content) if kind.endswith(".gz") else content)
    return path


def documents(prefix: Path, vocabulary: ItemVocabulary) -> list[list[int]]:
    """The items of each document, sorted."""
    dataset = IndexedDataset(prefix)
    keys = [None, *vocabulary.keys.to_pylist()]
    found = []
    for number in range(dataset.num_documents):
        *ids, end = dataset.document(number).tolist()
        assert end == END_ID
        assert END_ID not in ids
        found.append([int(str(keys[id_])) for id_ in ids])
    return sorted(found)


def plain(events: Iterable[Event], split: str, min_count: int) -> dict[str, list[list[int]]]:
    """What the three datasets have to hold."""
    sequences: dict[int, list[tuple[int, int]]] = defaultdict(list)
    distinct = list(dict.fromkeys(events))
    counts = Counter(item for _, item, _ in distinct)
    cuts = np.quantile([time for *_, time in events], (0.8, 0.9))
    for user, item, time in sorted(distinct, key=lambda event: event[2]):
        if counts[item] >= min_count:
            sequences[user].append((time, item))
    found: dict[str, list[list[int]]] = {"": [], "-validation": [], "-test": []}
    for sequence in sequences.values():
        items = [item for _, item in sequence]
        before = [sum(time < cut for time, _ in sequence) for cut in cuts]
        if split == "last":
            ends = (len(items) - 2, len(items) - 1, len(items)) if len(items) > 2 else (len(items), 0, 0)
        else:
            validation = before[0] + 1 if 0 < before[0] < before[1] else 0
            ends = before[0], validation, before[1] + 1 if 0 < before[1] < len(items) else 0
        for name, end in zip(found, ends, strict=True):
            if end > 1:
                found[name].append(items[:end])
    return {name: sorted(parts) for name, parts in found.items()}


@pytest.mark.parametrize("split", ["last", "time"])
@pytest.mark.parametrize("kind", ["csv", "tsv.gz", "parquet"])
def test_sequences_are_those_of_a_plain_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, split: Any
) -> None:
    monkeypatch.setattr(item_sequences, "PARTITION_BYTES", 1_000)
    events = made_events()
    output = tmp_path / "out"
    report = preprocess_events([write(tmp_path, kind, events)], COLUMNS, output, split=split, min_count=3)
    vocabulary, expected = ItemVocabulary.load(items_path(output)), plain(events, split, 3)
    assert {name: documents(Path(f"{output}{name}"), vocabulary) for name in expected} == expected
    assert list(report.documents.values()) == [len(parts) for parts in expected.values()]
    assert report.dropped["repeated"] == len(events) - len(set(events))
    assert vocabulary.counts.tolist() == sorted(vocabulary.counts.tolist(), reverse=True)
    assert report.events == vocabulary.counts.sum()
    assert IndexedDataset(output).info.end_token == END_ID  # type: ignore[union-attr]


def run(folder: Path, text: str, **options: Any) -> EventReport:
    path = folder / "events.csv"
    path.write_text("user,item,time\n" + text)
    return preprocess_events([path], COLUMNS, folder / "out", **options)


NO_ITEMS = ItemVocabulary(pa.array([], pa.string()), np.zeros(0, np.int64))
GOOD = "".join(f"{user},{item},{item}\n" for user in "ab" for item in range(1, 6))


def test_rows_that_lack_something_are_counted(tmp_path: Path) -> None:
    broken = "a,,7\n,1,7\na,1,\na,1,soon\na,1\na,1,2,3\nlonely,1,2\n"
    report = run(tmp_path, GOOD + broken)
    assert +report.dropped == {
        "with another number of columns": 2,
        "without user": 1,
        "without item": 1,
        "without time": 2,
        "alone in a user's training document": 1,
    }
    assert (report.events, report.users, report.items) == (11, 3, 5)


def columns_of(kind: str) -> dict[str, Any]:
    """Six events, and two without a user or a time, as programs write them: all tables are the same events."""
    numbers, dates = [None, *range(1, 8)], [f"2024-01-0{day}" for day in range(1, 8)] + [None]
    user, item = [number and 5 for number in numbers], [str(number) for number in range(8)]
    if kind == "not finite":
        floats = [float("nan") if number is None else float(number) for number in user]
        return {"user": floats, "item": item, "time": [*map(float, range(7)), float("inf")]}
    if kind == "categories":
        return {"user": pa.array(user).dictionary_encode(), "item": item, "time": pa.array(dates).dictionary_encode()}
    return {"user": user, "item": pa.array(item, kind), "time": pa.array(dates, kind)}


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "categories", "not finite"])
def test_tables_of_any_program_are_read_alike(tmp_path: Path, kind: str) -> None:
    pq.write_table(pa.table(columns_of(kind)), tmp_path / "t.parquet")
    report = preprocess_events([tmp_path / "t.parquet"], COLUMNS, tmp_path / "out", split="time")
    assert +report.dropped == {"without user": 1, "without time": 1}
    assert IndexedDataset(tmp_path / "out-test").document(0).tolist() == [1, 2, 3, 4, 5, 6, END_ID]


def test_numbers_and_dates_in_two_tables_are_refused(tmp_path: Path) -> None:
    for name, time in (("a", "1704067200"), ("b", "2024-01-01")):
        (tmp_path / f"{name}.csv").write_text(f"user,item,time\nu,i,{time}\n")
    with pytest.raises(FieldError, match=r"the same in all tables, but is both, of which .*b.csv` has the second"):
        preprocess_events([tmp_path / "a.csv", tmp_path / "b.csv"], COLUMNS, tmp_path / "out")


def test_keys_are_text_and_none_is_special(tmp_path: Path) -> None:
    names = ["0", "null", "<|endoftext|>", "é", "NA"]
    dates = ["2024-01-01", "2024-01-01T10:00:00Z", "2024-01-02 03:00:00", "2024-01-03", "2024-02-01"]
    run(tmp_path, "".join(f"a,{name},{date}\n" for name, date in zip(names, dates, strict=True)))
    entries = json.loads(items_path(tmp_path / "out").read_text())
    assert entries[0] == {"id": 0, "key": None, "count": 0}
    vocabulary = ItemVocabulary.load(items_path(tmp_path / "out"))
    tokens = IndexedDataset(tmp_path / "out-test").document(0)
    assert [vocabulary.keys[id_ - 1].as_py() for id_ in tokens[:-1].tolist()] == names


def test_an_earlier_vocabulary_keeps_its_ids_and_new_items_are_dropped(tmp_path: Path) -> None:
    run(tmp_path, GOOD)
    vocabulary = ItemVocabulary.load(items_path(tmp_path / "out"))
    report = run(tmp_path, GOOD + "a,new,9\n" + "c,5,1\nc,5,2\n" * 3, vocabulary=vocabulary)
    assert report.dropped["of items without an id"] == 1
    assert ItemVocabulary.load(items_path(tmp_path / "out")).keys == vocabulary.keys
    assert IndexedDataset(tmp_path / "out-test").document(0).tolist() == [*range(1, 6), END_ID]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("a,1,1\na,2,2\n", {}, r"`--split` must leave a sequence for validation"),
        (GOOD, {"min_count": 9}, r"`--split` must leave a sequence for train"),
        (GOOD, {"min_count": 2, "vocabulary": NO_ITEMS}, r"`--min-count` must be left out with --items, but is 2"),
        ("a,1,1/2/2024\na,2,soon\n", {}, r"but is 0 events of 0 users, 2 without time, which leave none"),
        ("a,1,1\na,2,2024-01-01\n", {}, r"`--time` must name a column of numbers or of dates"),
    ],
)
def test_tables_without_sequences_are_refused(tmp_path: Path, text: str, options: Any, message: str) -> None:
    with pytest.raises(FieldError, match=message):
        run(tmp_path, text, **options)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("kind", [pa.int32(), pa.float64(), pa.decimal128(24, 2)], ids=str)
def test_numbers_that_are_whole_have_no_decimal_point(tmp_path: Path, kind: pa.DataType) -> None:
    pq.write_table(
        pa.table({"user": [5] * 4, "item": pa.array(range(4)).cast(kind), "time": range(4)}), tmp_path / "t.parquet"
    )
    preprocess_events([tmp_path / "t.parquet"], COLUMNS, tmp_path / "out")
    assert {*ItemVocabulary.load(items_path(tmp_path / "out")).keys.to_pylist()} == {"0", "1", "2", "3"}


def test_decimals_keep_their_fraction(tmp_path: Path) -> None:
    items = pa.array([Decimal(key) for key in ("1.00", "1.50", "100.00", "0.10")], pa.decimal128(24, 2))
    pq.write_table(pa.table({"user": [5] * 4, "item": items, "time": range(4)}), tmp_path / "t.parquet")
    preprocess_events([tmp_path / "t.parquet"], COLUMNS, tmp_path / "out")
    assert {*ItemVocabulary.load(items_path(tmp_path / "out")).keys.to_pylist()} == {"1", "1.50", "100", "0.10"}


@pytest.mark.parametrize(
    ("columns", "name", "message"),
    [
        (EventColumns("usr", "item", "time"), "t.csv", "`--user` must name a column of its own .*did you mean `user`?"),
        (EventColumns("user", "item", "item"), "t.csv", "`--item` must name a column of its own"),
        (COLUMNS, "t.xls", "`--table` must name files that end in .csv"),
        (COLUMNS, "empty.csv", "must be a readable table, but is not .it is empty"),
        (COLUMNS, "none.csv", "must be a table, but there is no such file"),
        (COLUMNS, "broken.parquet", "must be a readable table"),
        (COLUMNS, "broken.csv.gz", "must be a readable table"),
    ],
)
def test_mistakes_are_told(tmp_path: Path, columns: EventColumns, name: str, message: str) -> None:
    if name != "none.csv":
        (tmp_path / name).write_text("" if name == "empty.csv" else f"user,item,time\n{GOOD}")
    with pytest.raises(UserError, match=message):
        preprocess_events([tmp_path / name], columns, tmp_path / "out")


def test_other_columns_may_be_empty_at_first_and_text_later(tmp_path: Path) -> None:
    """Later than the megabyte by which pyarrow guesses types."""
    lines = [f"{user},{item},{item}," for user in range(2) for item in range(60_000)]
    (tmp_path / "events.csv").write_text("\n".join(["user,item,time,note", *lines, "2,1,1,late"]))
    assert preprocess_events([tmp_path / "events.csv"], COLUMNS, tmp_path / "out").events == 120_001


def test_other_columns_may_have_another_encoding(tmp_path: Path) -> None:
    lines = (f"{k % 10},{k % 7},{k},caf\xe9" for k in range(100))
    (tmp_path / "events.csv").write_bytes("\n".join(["user,item,time,title", *lines]).encode("latin-1"))
    assert preprocess_events([tmp_path / "events.csv"], COLUMNS, tmp_path / "out").events == 100


def test_another_file_is_no_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "items.json").write_text('[{"id": 3}]')
    with pytest.raises(DataError, match=r"must be an items\.json"):
        ItemVocabulary.load(tmp_path / "items.json")


LONG_AGO, FAR_AHEAD = "0001-01-01", "9999-12-31"
TIMES = {
    "nanoseconds": pa.array(1_700_000_000_000_000_001 + np.arange(5)),
    "dates with nanoseconds": pa.array(1_700_000_000_000_000_001 + np.arange(5), pa.timestamp("ns")),
    "in a time zone": pa.array(1_700_000_000_000_000_001 + np.arange(5), pa.timestamp("ns", "Asia/Tokyo")),
    "far dates": pa.array([LONG_AGO, "2001-01-01", "2002-02-02", "2003-03-03", FAR_AHEAD]).cast(pa.date32()),
    "far dates as text": pa.array([LONG_AGO, "2001-01-01", "2002-02-02", "2003-03-03", FAR_AHEAD]),
}


@pytest.mark.parametrize("kind", TIMES)
def test_times_that_a_float_rounds_are_times(tmp_path: Path, kind: str) -> None:
    table = pa.table({"user": ["a"] * 5, "item": [*"vwxyz"], "time": TIMES[kind]})
    pq.write_table(table, tmp_path / "events.parquet")
    report = preprocess_events([tmp_path / "events.parquet"], COLUMNS, tmp_path / "out")
    assert (report.events, +report.dropped) == (5, Counter())
    keys = ItemVocabulary.load(items_path(tmp_path / "out")).keys.to_pylist()
    assert [keys[id_ - 1] for id_ in IndexedDataset(tmp_path / "out-test").document(0)[:-1]] == [*"vwxyz"]


@pytest.mark.parametrize("kind", ["csv", "tsv.gz"])
def test_a_value_may_have_several_lines_and_its_quotes_must_end(tmp_path: Path, kind: str) -> None:
    """Also in tables of more than the megabyte that is parsed at once."""
    mark, long_value = "\t" if "tsv" in kind else ",", "x\n" * 300
    lines = [("user", "item", "time", "n"), *((u, i, i, f'"{long_value}"') for u in "abc" for i in range(1000))]
    path = tmp_path / f"events.{kind}"

    def write_lines(end: str) -> None:
        content = "\n".join(mark.join(map(str, line)) for line in lines) + end
        path.write_bytes(gzip.compress(content.encode()) if kind.endswith(".gz") else content.encode())

    for end in ("", "\n"):
        write_lines(end)
        report = preprocess_events([path], COLUMNS, tmp_path / "out")
        assert (report.events, report.users, +report.dropped) == (3000, 3, Counter())
    lines.insert(-10, ("d", 1, 1, '"Their quotes do not end'))
    for end in ("", "\n"):
        write_lines(end)
        with pytest.raises(DataError, match=r"must be a readable table, but is not \(the last quotes do not end\)"):
            preprocess_events([path], COLUMNS, tmp_path / "out")
