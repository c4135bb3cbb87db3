"""Files for and from Megatron-LM and GPT-NeoX, read and written here by a reader and a writer of their format alone."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from megahead.config.data import DataConfig
from megahead.data.indexed import IndexedDataset
from megahead.data.loader import training_samples
from megahead.data.samples import ConcatenatedSamples, StoredSamples, held_out_samples
from megahead.data.writer import IndexedDatasetWriter
from megahead.errors import DataError

CODES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
Sequences = list[list[int]]


def read_pair(prefix: Path) -> tuple[str, Sequences, list[int]]:
    """(token type, sequences, document index), as Megatron's reader takes the bytes apart."""
    idx, tokens = Path(f"{prefix}.idx").read_bytes(), Path(f"{prefix}.bin").read_bytes()
    assert idx[:9] == b"MMIDIDX\x00\x00"
    version, code, count, boundaries = struct.unpack("<QBQQ", idx[9:34])
    assert version == 1
    lengths = np.frombuffer(idx, "<i4", count, 34)
    pointers = np.frombuffer(idx, "<i8", count, 34 + lengths.nbytes)
    documents = np.frombuffer(idx, "<i8", boundaries, 34 + lengths.nbytes + pointers.nbytes)
    assert len(idx) == 34 + lengths.nbytes + pointers.nbytes + documents.nbytes
    sequences = [
        np.frombuffer(tokens, CODES[code], length, pointer).tolist()
        for length, pointer in zip(lengths, pointers, strict=True)
    ]
    return CODES[code], sequences, documents.tolist()


def write_pair(prefix: Path, sequences: Sequences, documents: list[int], code: int) -> Path:
    """As their builders do it: sizes, then pointers by adding up, then the document index."""
    dtype = np.dtype(CODES[code])
    pointers = [sum(map(len, sequences[:i])) * dtype.itemsize for i in range(len(sequences))]
    with Path(f"{prefix}.idx").open("wb") as idx:
        idx.write(b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code))
        idx.write(struct.pack("<Q", len(sequences)) + struct.pack("<Q", len(documents)))
        idx.write(np.array([len(sequence) for sequence in sequences], np.int32).tobytes())
        idx.write(np.array(pointers, np.int64).tobytes())
        idx.write(np.array(documents, np.int64).tobytes())
    Path(f"{prefix}.bin").write_bytes(b"".join(np.array(s, dtype).tobytes() for s in sequences))
    return prefix


TEXTS = [[5, 6, 7, 0], [], [8, 0], list(range(300))]


@pytest.mark.parametrize(("vocab_size", "code"), [(65_499, 8), (65_500, 4), (119_547, 4)])
def test_our_files_are_theirs_byte_for_byte(tmp_path: Path, vocab_size: int, code: int) -> None:
    with IndexedDatasetWriter(tmp_path / "ours", vocab_size=vocab_size) as writer:
        for text in TEXTS:
            writer.add_document(text)
    assert read_pair(tmp_path / "ours") == (CODES[code], TEXTS, [0, 1, 2, 3, 4])
    theirs = write_pair(tmp_path / "theirs", TEXTS, [0, 1, 2, 3, 4], code)
    for ending in (".bin", ".idx"):
        assert Path(f"{tmp_path / 'ours'}{ending}").read_bytes() == Path(f"{theirs}{ending}").read_bytes()


@pytest.mark.parametrize("code", CODES)
def test_their_files_are_read(tmp_path: Path, code: int) -> None:
    sequences = [[1, 2, 3], [4], [100, 101, 0], []]
    dataset = IndexedDataset(write_pair(tmp_path / "theirs", sequences, [0, 2, 4], code))
    assert [sequence.tolist() for sequence in dataset] == sequences
    assert dataset.document_index.tolist() == [0, 2, 4]
    assert ConcatenatedSamples(dataset, 2, 0).read([0, 1])[0].dtype == np.int64


@pytest.fixture
def preshuffled(tmp_path: Path) -> IndexedDataset:
    """Pythia's layout in small: 30 rows of 17 tokens, and a document index of just [0]."""
    rows = np.random.default_rng(0).integers(1, 50_000, (30, 17)).tolist()
    return IndexedDataset(write_pair(tmp_path / "preshuffled", rows, [0], 8))


def test_preshuffled_rows_keep_their_order(preshuffled: IndexedDataset) -> None:
    _, rows, documents = read_pair(preshuffled.prefix)
    assert documents == [0]
    data = DataConfig(train="x", sequence_length=16, order="stored")
    samples = training_samples(data, [preshuffled], 99, data.sequence_length)
    step = samples.read(range(8, 16))[0]  # step 1 of 8 rows
    assert step.tolist() == rows[8:16]
    assert samples.read([29, 30])[0].tolist() == [rows[29], rows[0]]  # a second epoch begins again
    held_out = held_out_samples(preshuffled, 16)
    assert held_out.read(range(30))[0].tolist() == rows


def test_stored_rows_are_never_joined_or_cut(preshuffled: IndexedDataset, tmp_path: Path) -> None:
    for length in (15, 17, 33):
        with pytest.raises(DataError, match=rf"sequences of {length + 1} tokens .* by [+]?{16 - length}\."):
            StoredSamples(preshuffled, length)
    uneven = IndexedDataset(write_pair(tmp_path / "uneven", [[1] * 5, [1] * 4, [1] * 6, [1] * 5], [0], 8))
    assert uneven.num_tokens == 4 * 5
    with pytest.raises(DataError, match=r"must have sequences of 5 tokens .* but sequence 1 has 4"):
        StoredSamples(uneven, 4).read(range(4))
