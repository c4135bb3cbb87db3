"""A dataset appears whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megahead import files as atomic_file
from megahead.data import writer as writer_module
from megahead.data.indexed import IndexedDataset
from megahead.data.writer import IndexedDatasetWriter
from megahead.errors import DataError
from megahead.files import InUseError, WriteError


def write(prefix: Path, documents: list[list[int]]) -> None:
    with IndexedDatasetWriter(prefix, vocab_size=10) as writer:
        for document in documents:
            writer.add_document(document)


@pytest.mark.parametrize("wrong", [10, -1, 70_000])
def test_refuses_ids_outside_the_vocabulary_and_leaves_nothing(tmp_path: Path, wrong: int) -> None:
    with pytest.raises(DataError, match=f"below the vocabulary size 10, but one near document 1 is {wrong}"):
        write(tmp_path / "data", [[9], [1, wrong]])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [[1.5, 2.0], [True, False], [[1, 2], [3, 4]], "12", None, 3], ids=str)
def test_refuses_what_is_no_list_of_integers(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(DataError, match=r"a document must be a list of integer ids, but one is \[.*\] of "):
        write(tmp_path / "data", [[9], wrong])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [0, -3, 1.5, "100", None], ids=str)
def test_refuses_a_vocabulary_of_no_ids(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(ValueError, match="`vocab_size` must be a whole number above 0, but is"):
        IndexedDatasetWriter(tmp_path / "data", vocab_size=wrong)


@pytest.mark.parametrize("prefix", ["", ".", "data/", "data/."])
def test_refuses_a_folder_as_a_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="`prefix` must end in the name of the dataset, but is"):
        IndexedDatasetWriter(prefix, vocab_size=10)
    assert list(tmp_path.iterdir()) == []


def full_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_the_old_dataset(
    write_dataset: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = write_dataset([[1, 2, 3]])
    before = sorted(prefix.parent.iterdir())
    monkeypatch.setattr(atomic_file.os, "fsync", full_disk)
    with pytest.raises(WriteError, match=r"data\.bin` must be writable, but is not: No space left"):
        write_dataset([[4]])
    assert sorted(prefix.parent.iterdir()) == before
    assert IndexedDataset(prefix)[0].tolist() == [1, 2, 3]


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # as a quota would
    try:
        with pytest.raises(WriteError, match=r"data\.bin` must be writable, but is not: File too large"):
            write(tmp_path / "data", [[1] * 100_000])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_refuses_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match="must be writable"):
        IndexedDatasetWriter(tmp_path / "file" / "data", vocab_size=10)


def test_two_writers_of_one_name_do_not_mix(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "data", vocab_size=10) as first:
        with pytest.raises(InUseError, match="another process is writing it"):
            IndexedDatasetWriter(tmp_path / "data", vocab_size=10)
        first.add_document([1])
    assert IndexedDataset(tmp_path / "data")[0].tolist() == [1]


def test_a_writer_that_cannot_open_all_its_files_leaves_none(tmp_path: Path) -> None:
    other = atomic_file.AtomicFile(tmp_path / "data.json")
    with pytest.raises(InUseError):
        IndexedDatasetWriter(tmp_path / "data", vocab_size=10)
    other.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_killed_run_leaves_nothing_behind_in_the_next(tmp_path: Path) -> None:
    (tmp_path / "data.bin.partial").write_bytes(b"left over")
    with IndexedDatasetWriter(tmp_path / "data", vocab_size=10) as writer:
        writer.add_document([5])
    assert Path(tmp_path / "data.bin").read_bytes() == b"\5\0"
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".bin", ".idx", ".json"]


def test_documents_in_bulk_equal_documents_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "FLUSH_TOKENS", 10)
    tokens = np.random.default_rng(0).integers(0, 50, 200)
    lengths = np.array([3, 0, 97, 100])
    with IndexedDatasetWriter(tmp_path / "bulk", vocab_size=50) as writer:
        writer.add_documents(tokens, lengths, text_bytes=700)
    with IndexedDatasetWriter(tmp_path / "single", vocab_size=50) as writer:
        for part, size in zip(np.split(tokens, np.cumsum(lengths)[:-1]), (100, 0, 300, 300), strict=True):
            writer.add_document(part, text_bytes=size)
    for ending in (".bin", ".idx", ".json"):
        assert Path(f"{tmp_path / 'bulk'}{ending}").read_bytes() == Path(f"{tmp_path / 'single'}{ending}").read_bytes()


def test_describes_itself(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "data", vocab_size=4, tokenizer="t.json") as writer:
        writer.add_document([1, 1, 3], text_bytes=11)
    info = IndexedDataset(tmp_path / "data").info
    assert info is not None
    assert (info.tokens, info.documents, info.text_bytes, info.vocab_size) == (3, 1, 11, 4)
    assert (info.tokenizer, info.token_counts) == ("t.json", [0, 2, 0, 1])
    for fingerprint, ending in ((info.bin, ".bin"), (info.idx, ".idx")):
        data = Path(f"{tmp_path / 'data'}{ending}").read_bytes()
        assert (fingerprint.bytes, fingerprint.sha256) == (len(data), hashlib.sha256(data).hexdigest())


@pytest.mark.parametrize("documents", [[], [[], []]])
def test_a_dataset_without_a_token_is_refused_and_the_old_one_stays(tmp_path: Path, documents: list[list[int]]) -> None:
    write(tmp_path / "data", [[1, 2, 3]])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(DataError, match=r"data\.bin` must get at least one token, but got none; nothing was written"):
        write(tmp_path / "data", documents)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
