"""Parquet files and saved Hugging Face datasets give the same documents as JSON lines."""

from __future__ import annotations

from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megahead.data import records
from megahead.data.records import Selection
from megahead.data.sources import find_inputs, read_chunks, total_bytes
from megahead.errors import DataError

TEXTS = [f"text {i} " + "é" * (i % 50) for i in range(300)]
RECORDS = [{"text": text, "meta": {"set": "even" if i % 2 == 0 else "odd"}, "n": i} for i, text in enumerate(TEXTS)]


def write(folder: Path, kind: str) -> Path:
    table = pa.Table.from_pylist(RECORDS)
    if kind == "parquet":
        pq.write_table(table, folder / "text.parquet", row_group_size=120)
        return folder / "text.parquet"
    files = [{"filename": f"data-0000{i}-of-00002.arrow"} for i in range(2)]
    for part, file in zip((table.slice(0, 170), table.slice(170)), files, strict=True):
        with pa.ipc.new_stream(str(folder / file["filename"]), table.schema) as writer:
            writer.write_table(part, max_chunksize=100)
    (folder / "state.json").write_bytes(orjson.dumps({"_data_files": files, "_indices_data_files": None}))
    return folder


@pytest.mark.parametrize("block", [1000, 1 << 22])
@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_reads_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, block: int) -> None:
    monkeypatch.setattr(records, "BLOCK_BYTES", block)
    inputs = find_inputs([write(tmp_path, kind)])
    chunks = list(read_chunks(inputs, Selection()))
    assert [text for chunk in chunks for text in chunk.parse().require_texts()] == TEXTS
    assert sum(chunk.disk_bytes for chunk in chunks) == pytest.approx(total_bytes(inputs), rel=0.02)
    odd = read_chunks(inputs, Selection("text", keep=(("meta.set", "odd"),)))
    assert [text for chunk in odd for text in chunk.parse().require_texts()] == TEXTS[1::2]


def test_of_several_columns_each_row_has_its_own(tmp_path: Path) -> None:
    rows = [{"text": "one", "body": "no"}, {"text": None, "body": "two"}, {"text": "", "body": "three"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "text.parquet")
    chunks = read_chunks(find_inputs([tmp_path / "text.parquet"]), Selection(("title", "text", "body")))
    assert [text for chunk in chunks for text in chunk.parse().require_texts()] == ["one", "two", "three"]


def test_a_chunk_counts_only_its_own_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a batch refers to the memory of all of it."""
    table = pa.Table.from_pylist(RECORDS)
    with pa.ipc.new_stream(str(tmp_path / "one_batch.arrow"), table.schema) as writer:
        writer.write_table(table)
    monkeypatch.setattr(records, "BLOCK_BYTES", 2 * table.nbytes)
    assert len(list(read_chunks(find_inputs([tmp_path / "one_batch.arrow"]), Selection()))) == 1


def test_reads_what_the_library_saves(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    saved = datasets.Dataset.from_list(RECORDS).select(range(10, 60))
    datasets.DatasetDict(train=saved).save_to_disk(tmp_path / "saved")
    chunks = read_chunks(find_inputs([tmp_path / "saved" / "train"]), Selection())
    assert [text for chunk in chunks for text in chunk.parse().require_texts()] == TEXTS[10:60]
    with pytest.raises(DataError, match="must be one split of a saved dataset, but holds train"):
        find_inputs([tmp_path / "saved"])


@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_a_missing_column_and_a_broken_row_are_named(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, kind)
    with pytest.raises(DataError, match="must have a column for 'body', but has text, meta, n"):
        list(read_chunks(find_inputs([path]), Selection("body")))
    parsed = next(read_chunks(find_inputs([path]), Selection("n"))).parse()
    assert parsed.errors[2].endswith(":3` must have a string in `n`, but has int instead.")


def test_damage_is_one_sentence(tmp_path: Path) -> None:
    path = write(tmp_path, "parquet")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match="must be a readable Parquet file"):
        list(read_chunks(find_inputs([path]), Selection()))
    (tmp_path / "text.arrow").write_bytes(b"nonsense")
    with pytest.raises(DataError, match="must be a readable Arrow stream"):
        list(read_chunks(find_inputs([tmp_path / "text.arrow"]), Selection()))
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=r"folder` must hold files that end in one of \.jsonl, .*, but holds none"):
        find_inputs([tmp_path / "folder"])


def test_a_row_that_is_no_utf8_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    texts = pa.array([b"fine", b"bro\xffken", b"fine too"]).cast(pa.string(), safe=False)
    pq.write_table(pa.table({"text": texts}), tmp_path / "t.parquet")
    parsed = next(read_chunks(find_inputs([tmp_path / "t.parquet"]), Selection())).parse()
    assert [problem.partition("t.parquet")[2] for problem in parsed.errors] == [
        ":2` must be UTF-8 text, but is not (invalid start byte)."
    ]
    assert parsed.texts == ["fine", "fine too"]
