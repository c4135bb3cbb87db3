"""The `.bin` / `.idx` format byte by byte, and every way a pair of files can be wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megahead.data.indexed import HEADER, MAGIC, IndexedDataset
from megahead.data.writer import IndexedDatasetWriter
from megahead.errors import DataError

GOLDEN = bytes.fromhex(
    "4d4d494449445800 00 0100000000000000 08 0200000000000000 0300000000000000 03000000 05000000 "
    "0000000000000000 0600000000000000 0000000000000000 0100000000000000 0200000000000000"
)


def write_pair(folder: Path, idx: bytes, bin_: bytes) -> Path:
    (folder / "data.idx").write_bytes(idx)
    (folder / "data.bin").write_bytes(bin_)
    return folder / "data"


def test_writes_the_published_example(write_dataset: Callable[..., Path]) -> None:
    prefix = write_dataset([[1, 2, 3], [4, 5, 6, 7, 8]])
    assert Path(f"{prefix}.idx").read_bytes() == GOLDEN
    assert Path(f"{prefix}.bin").read_bytes() == np.arange(1, 9, dtype="<u2").tobytes()


def test_reads_the_published_example(tmp_path: Path) -> None:
    dataset = IndexedDataset(write_pair(tmp_path, GOLDEN, np.arange(8, dtype="<u2").tobytes()))
    assert [sequence.tolist() for sequence in dataset] == [[0, 1, 2], [3, 4, 5, 6, 7]]
    assert dataset[-1].tolist() == [3, 4, 5, 6, 7]
    assert (len(dataset), dataset.num_documents, dataset.num_tokens, dataset.dtype) == (2, 2, 8, np.uint16)
    assert dataset.sizes.tolist() == [3, 5]
    assert dataset.offsets.tolist() == [0, 6]
    assert dataset.document_index.tolist() == [0, 1, 2]
    assert dataset.offsets.flags.aligned
    assert dataset.info is None


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_499, np.uint16), (65_500, np.int32), (300_000, np.int32)])
def test_vocabulary_chooses_the_type(write_dataset: Callable[..., Path], vocab_size: int, dtype: type) -> None:
    dataset = IndexedDataset(write_dataset([[0, vocab_size - 1]], vocab_size))
    assert dataset.dtype == dtype
    assert dataset[0].tolist() == [0, vocab_size - 1]


def test_preshuffled_rows_name_no_documents(tmp_path: Path) -> None:
    rows = np.arange(3 * 2049, dtype="<u2").reshape(3, 2049)
    header = HEADER.pack(MAGIC, 1, 8, 3, 1)
    sizes, offsets = np.full(3, 2049, "<i4"), np.arange(3, dtype="<i8") * 4098
    idx = header + sizes.tobytes() + offsets.tobytes() + np.zeros(1, "<i8").tobytes()
    dataset = IndexedDataset(write_pair(tmp_path, idx, rows.tobytes()))
    assert (len(dataset), dataset.num_documents) == (3, 0)
    assert np.array_equal(dataset[2], rows[2])


def test_modes_after_the_documents_are_accepted(tmp_path: Path) -> None:
    dataset = IndexedDataset(write_pair(tmp_path, GOLDEN + b"\0\1", bytes(16)))
    assert len(dataset) == 2


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 69_999), max_size=20), max_size=12).filter(any), st.sampled_from([70_000, 65_499])
)
def test_reads_back_what_was_written(tmp_path_factory: pytest.TempPathFactory, lists: list[list[int]], v: int) -> None:
    documents = [[token % v for token in tokens] for tokens in lists]
    prefix = tmp_path_factory.mktemp("roundtrip") / "data"
    with IndexedDatasetWriter(prefix, vocab_size=v) as writer:
        for document in documents:
            writer.add_document(document)
    dataset = IndexedDataset(prefix)
    flat = [token for document in documents for token in document]
    assert [dataset[i].tolist() for i in range(len(dataset))] == documents
    assert dataset.read(0, len(flat)).tolist() == flat
    assert dataset.document_index.tolist() == list(range(len(documents) + 1))
    assert dataset.info is not None
    assert dataset.info.token_counts == np.bincount(flat, minlength=v).tolist()


def test_reads_over_sequence_boundaries(flat_dataset: Callable[[int], Path]) -> None:
    dataset = IndexedDataset(flat_dataset(60))
    assert dataset.read(5, 40).tolist() == list(range(5, 45))
    with pytest.raises(IndexError):
        dataset.read(50, 11)
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def corrupt(at: int, value: bytes) -> bytes:
    return GOLDEN[:at] + value + GOLDEN[at + len(value) :]


@pytest.mark.parametrize(
    ("idx", "bin_bytes", "says"),
    [
        (b"PK\3\4 something else entirely, longer than a header", 16, "must begin with the magic"),
        (b"", 16, "must begin with the magic"),
        (GOLDEN[:20], 16, "header of 34 bytes, but has 20"),
        (corrupt(9, b"\2"), 16, "version 2"),
        (corrupt(17, b"\6"), 16, "has 6 instead"),
        (corrupt(17, b"\7"), 16, "has 7 instead"),
        (corrupt(17, b"\x09"), 16, "has 9 instead"),
        (GOLDEN[:-1], 16, "82 bytes long for 2 sequences"),
        (GOLDEN[:50], 16, "but is 50 instead"),
        (corrupt(18, b"\xff" * 8), 16, "cut short or is damaged"),
        (GOLDEN, 14, "must be 16 bytes long by its index, but is 14"),
        (GOLDEN, 15, "but is 15 instead"),
        (GOLDEN, 18, "but is 18 instead"),
        (GOLDEN, 0, "but is 0 instead"),
        (corrupt(58, b"\1"), 16, "begin at sequence 0"),
        (corrupt(74, b"\3"), 16, "end at 2"),
    ],
)
def test_refuses_damaged_files(tmp_path: Path, idx: bytes, bin_bytes: int, says: str) -> None:
    with pytest.raises(DataError, match=says):
        IndexedDataset(write_pair(tmp_path, idx, bytes(bin_bytes)))


@pytest.mark.parametrize("missing", [".bin", ".idx"])
def test_names_the_missing_file(write_dataset: Callable[..., Path], missing: str) -> None:
    prefix = write_dataset([[1]])
    Path(f"{prefix}{missing}").unlink()
    with pytest.raises(DataError, match=rf"{prefix.name}\{missing}` must exist"):
        IndexedDataset(prefix)


def test_pieces_of_one_file_are_reported(tmp_path: Path) -> None:
    (tmp_path / "data.idx").write_bytes(GOLDEN)
    for piece in range(2):
        (tmp_path / f"data-0000{piece}-of-00002.bin").write_bytes(bytes(8))
    with pytest.raises(DataError, match=r"lies in 2 pieces; join them: cat .*data-\*\.bin > "):
        IndexedDataset(tmp_path / "data")


def test_a_dataset_of_a_longer_name_is_no_piece(tmp_path: Path) -> None:
    (tmp_path / "data.idx").write_bytes(GOLDEN)
    for suffix in (".bin", ".idx"):
        (tmp_path / f"data-validation{suffix}").write_bytes(GOLDEN)
    with pytest.raises(DataError, match=r"data\.bin` must exist"):
        IndexedDataset(tmp_path / "data")


def test_damage_in_the_middle_is_found_on_use(tmp_path: Path) -> None:
    dataset = IndexedDataset(write_pair(tmp_path, corrupt(34, b"\4"), bytes(16)))
    with pytest.raises(DataError, match="must add up to the 8 tokens"):
        _ = dataset.sizes
    dataset = IndexedDataset(write_pair(tmp_path, corrupt(42, b"\x40"), bytes(16)))
    with pytest.raises(DataError, match="sequence 0 lies outside"):
        dataset[0]


def test_a_description_of_other_files_is_refused(write_dataset: Callable[..., Path]) -> None:
    prefix, other = write_dataset([[1, 2]]), write_dataset([[1, 2, 3]], name="other")
    Path(f"{prefix}.json").write_bytes(Path(f"{other}.json").read_bytes())
    with pytest.raises(DataError, match="describes other sizes"):
        _ = IndexedDataset(prefix).info
    Path(f"{prefix}.json").write_text('{"format": "something"}')
    with pytest.raises(DataError, match="must be a dataset description"):
        _ = IndexedDataset(prefix).info
