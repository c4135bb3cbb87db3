"""Far files on this machine: fetched once, checked, then named."""

from __future__ import annotations

import fcntl
import multiprocessing
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megahead import remote_files as cache
from megahead.data.indexed import IndexedDataset
from megahead.data.writer import IndexedDatasetWriter
from megahead.errors import DataError, FieldError
from megahead.remote_files import DamagedError, ExpectedFile, RemoteError, Store, fetch_into, local_file
from support.small_run import write_text


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def far_text(tmp_path: Path) -> str:
    (tmp_path / "store").mkdir()
    write_text(tmp_path / "store")
    return f"file://{tmp_path}/store/text"


def cached(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache").rglob("*") if path.is_file())


def test_a_far_dataset_is_the_same_as_on_a_disk_and_is_fetched_once(tmp_path: Path, far_text: str) -> None:
    near, fetched = IndexedDataset(tmp_path / "store/text"), IndexedDataset(far_text)
    assert np.array_equal(near.read(0, near.num_tokens), fetched.read(0, fetched.num_tokens))
    assert near.fingerprint == fetched.fingerprint
    assert cached(tmp_path) == ["text.bin", "text.idx", "text.json"]
    before = fetched.bin_path.stat().st_mtime_ns
    assert IndexedDataset(far_text).bin_path.stat().st_mtime_ns == before


@pytest.mark.parametrize("is_uploaded", [True, False])
def test_the_tokenizer_of_a_far_dataset_is_fetched_too(tmp_path: Path, is_uploaded: bool) -> None:
    (tmp_path / "words.json").write_text("{}")
    with IndexedDatasetWriter(tmp_path / "store/text", vocab_size=9, tokenizer_file=tmp_path / "words.json") as writer:
        writer.add_document([1, 0])
    path = IndexedDataset(tmp_path / "store/text").tokenizer_path()
    assert path is not None
    if not is_uploaded:
        path.unlink()
    fetched = IndexedDataset(f"file://{tmp_path}/store/text").tokenizer_path()
    assert (fetched is not None and fetched.read_text() == "{}") == is_uploaded


def test_a_dataset_that_was_replaced_is_fetched_anew(tmp_path: Path, far_text: str) -> None:
    first = IndexedDataset(far_text)
    write_text(tmp_path / "store", seed=7)
    second = IndexedDataset(far_text)
    assert first.fingerprint != second.fingerprint
    assert second.fingerprint == IndexedDataset(tmp_path / "store/text").fingerprint


def test_a_dataset_of_another_tool_is_fetched_without_checksums(tmp_path: Path, far_text: str) -> None:
    (tmp_path / "store/text.json").unlink()
    assert IndexedDataset(far_text).num_tokens == IndexedDataset(tmp_path / "store/text").num_tokens
    write_text(tmp_path / "store", documents=20)
    (tmp_path / "store/text.json").unlink()
    assert IndexedDataset(far_text).num_documents == 20


def test_a_damaged_or_missing_dataset_leaves_nothing_that_counts(tmp_path: Path, far_text: str) -> None:
    file = tmp_path / "store/text.bin"
    content = bytearray(file.read_bytes())
    content[9] ^= 1
    file.write_bytes(content)
    with pytest.raises(DamagedError, match=r"text\.bin` must match its checksum"):
        IndexedDataset(far_text)
    assert cached(tmp_path) == ["text.json"]
    with pytest.raises(DataError, match=r"/other` must exist, but does not; give the prefix"):
        IndexedDataset(far_text.replace("text", "other"))


def test_a_far_file_is_a_path_and_a_path_is_itself(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    there = local_file(f"file://{tmp_path}/tokenizer.json")
    assert Path(there).read_text() == "{}"
    assert local_file("some/path") == "some/path"
    with pytest.raises(FieldError, match="without password, key or query"):
        local_file("https://host/tokenizer.json?token=abc")
    with pytest.raises(RemoteError, match="must exist, but does not; check the address"):
        local_file(f"file://{tmp_path}/none.json")


def _hold(partial: Path, seen: Any, then: Path) -> None:
    """Another process that fetches: it has the lock, then gives the file its name."""
    with partial.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(b"content")
        file.flush()
        (partial.parent / "held").touch()
        assert seen.wait(60)
        partial.rename(then)


def test_what_another_process_fetches_is_waited_for(tmp_path: Path) -> None:
    folder, store = tmp_path / "copies", Store(f"file://{tmp_path}/nowhere")
    folder.mkdir()
    context, waited = multiprocessing.get_context("fork"), 0
    seen = context.Event()
    other = context.Process(target=_hold, args=(folder / "file.partial", seen, folder / "file"))
    other.start()
    while not (folder / "held").exists():
        assert other.is_alive()
        time.sleep(0.01)
    for _ in fetch_into(folder, store, {"file": ExpectedFile(7)}):
        waited += 1
        seen.set()
    other.join()
    assert waited > 0
    assert (folder / "file").read_bytes() == b"content"


def test_one_that_no_longer_gets_anywhere_is_waited_for_a_limited_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "TIMEOUT_SECONDS", 0.1)
    store = Store(f"file://{tmp_path}/nowhere")
    with (tmp_path / "file.partial").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(RemoteError, match=r"but the one that does has received nothing for 0\.2 s; end it\.$"):
            list(fetch_into(tmp_path, store, {"file": ExpectedFile(7)}))


def test_progress_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cache, "PROGRESS_SECONDS", 0)
    store = Store(f"file://{tmp_path}/store")
    store.write("file", b"content")
    list(fetch_into(tmp_path / "copies", store, {"file": ExpectedFile(7)}))
    assert capsys.readouterr().out == f"fetching file://{tmp_path}/store/file: 0.00 GiB of 0.00 GiB\n"
