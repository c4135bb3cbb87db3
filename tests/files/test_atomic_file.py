"""Files appear whole or not at all, whoever else writes them, with locks and without."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from megahead.files import AtomicFile, InUseError, write_atomically

FORK = multiprocessing.get_context("fork")


def without_locks(*_: Any) -> None:
    raise OSError(errno.ENOSYS, "Function not implemented")


def test_what_was_published_between_opening_and_locking_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, lock = tmp_path / "table", fcntl.flock
    first = AtomicFile(path)
    first.write(b"published")

    def late(*arguments: Any) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        first.sync()
        first.publish()
        lock(*arguments)

    monkeypatch.setattr(fcntl, "flock", late)
    second = AtomicFile(path)
    assert path.read_bytes() == b"published"
    second.write(b"anew")
    second.sync()
    second.publish()
    assert path.read_bytes() == b"anew"
    assert list(tmp_path.iterdir()) == [path]


def test_writers_without_locks_do_not_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", without_locks)
    one, other = AtomicFile(tmp_path / "table"), AtomicFile(tmp_path / "table")
    for file, text in ((one, b"one"), (other, b"other"), (one, b" and one"), (other, b" and other")):
        file.write(text)
    for file, whole in ((one, b"one and one"), (other, b"other and other")):
        file.sync()
        file.publish()
        assert (tmp_path / "table").read_bytes() == whole
    assert [path.name for path in tmp_path.iterdir()] == ["table"]


def test_a_lock_that_is_held_is_reported(tmp_path: Path) -> None:
    held = AtomicFile(tmp_path / "table")
    with pytest.raises(InUseError, match=r"table\.partial` must not be in use, but another process is writing it"):
        AtomicFile(tmp_path / "table")
    held.discard()
    AtomicFile(tmp_path / "table").discard()
    assert not list(tmp_path.iterdir())


def test_a_reader_never_sees_half_of_what_many_write_at_once(tmp_path: Path) -> None:
    path, start, begun = tmp_path / "table", FORK.Barrier(4), FORK.Event()

    def work(name: bytes) -> None:
        start.wait()
        write_atomically(path, *[name * 10_000] * 100)
        begun.wait(60)  # until the reader reads
        for _ in range(3):
            write_atomically(path, *[name * 10_000] * 100)

    writers = [FORK.Process(target=work, args=(name,)) for name in (b"a", b"b", b"c", b"d")]
    for writer in writers:
        writer.start()
    seen: set[bytes] = set()
    while any(writer.is_alive() for writer in writers):
        if path.exists():
            seen.add(path.read_bytes())
            begun.set()
    assert [writer.exitcode for writer in writers] == [0] * 4
    assert seen
    assert seen <= {name * 1_000_000 for name in (b"a", b"b", b"c", b"d")}
    assert list(tmp_path.iterdir()) == [path]
