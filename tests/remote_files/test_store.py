"""A place in a store: what was put there is there, and a store that fails, loses, or never answers is named."""

from __future__ import annotations

import hashlib
import threading
import time
from concurrent.futures import Future
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from megahead import remote_files as far_store
from megahead.remote_files import DamagedError, ExpectedFile, RemoteError, Store, download
from support.far_stores import Faulty, faults, s3  # noqa: F401 - a fixture


def received(store: Store, name: str, expected: ExpectedFile) -> bytes:
    parts: list[bytes] = []
    for _ in download(store, name, expected, parts.append):
        pass
    return b"".join(parts)


def expected_of(content: bytes) -> ExpectedFile:
    return ExpectedFile(len(content), hashlib.sha256(content).hexdigest())


def test_files_of_many_parts_come_back_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(far_store, "BLOCK", 7)
    content = bytes(range(256)) * 3
    (tmp_path / "file").write_bytes(content)
    for url in (f"file://{tmp_path}/store", "memory://store"):
        store = Store(url)
        store.put(tmp_path / "file", "a/b")
        assert received(store, "a/b", expected_of(content)) == content
        assert (store.sizes("a"), store.sizes(""), store.sizes("none")) == ({"a/b": 768}, {"a/b": 768}, {})
        store.write("a/c", b"small")
        assert (store.read("a/c"), store.read_if_exists("a/d")) == (b"small", None)
        for _ in range(2):
            store.remove("a/c")
        assert list(store.sizes("")) == ["a/b"]


def test_an_empty_file_is_a_file(tmp_path: Path) -> None:
    store, file = Store(f"file://{tmp_path}/store"), tmp_path / "empty"
    file.touch()
    store.put(file, "empty")
    assert received(store, "empty", expected_of(b"")) == b""


def test_what_is_not_as_recorded_is_named(tmp_path: Path) -> None:
    store = Store(f"file://{tmp_path}")
    store.write("file", b"content")
    with pytest.raises(DamagedError, match=r"file` must match its checksum, but does not; it was damaged\.$"):
        received(store, "file", expected_of(b"another"))
    with pytest.raises(DamagedError, match=r"file` must have 9 bytes, but has 7 instead\.$"):
        received(store, "file", expected_of(b"much more"))
    with pytest.raises(DamagedError, match=r"other` must exist, but is missing\.$"):
        received(store, "other", expected_of(b"content"))


@pytest.mark.parametrize("fault", ["loses", "cuts"])
def test_a_store_that_loses_writes_is_noticed(fault: str, tmp_path: Path) -> None:
    store = Store(f"faulty://{tmp_path}/store")
    (tmp_path / "store").mkdir()
    with faults(fault), pytest.raises(RemoteError, match="must read back as it was written, but does not"):
        store.write("small", b"content")


def test_a_disk_that_is_full_keeps_what_was_there(tmp_path: Path) -> None:
    store = Store(f"faulty://{tmp_path}")
    store.write("small", b"content")
    with faults("is full"), pytest.raises(RemoteError, match="must have room, but has none"):
        store.write("small", b"other content")
    assert store.read("small") == b"content"
    assert list(store.sizes("")) == ["small"]


def test_a_version_is_another_when_the_file_was_replaced_whatever_the_store_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fsspec takes what a web server has for unchanging, though that tells its length and tag."""
    monkeypatch.setattr(Faulty, "ukey", lambda *_: "the same")
    store = Store(f"faulty://{tmp_path}")
    store.write("file", b"content")
    before = store.version("file")
    assert store.version("file") == before
    store.write("file", b"other content")
    assert store.version("file") != before


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("fails", r"must be reachable, but is not \(PermissionError: 403 Forb"),
        ("is full", r"must have room, but has none \(OSError: .*No space left on device.*\); free some there\.$"),
    ],
)
def test_a_store_that_refuses_is_named_with_what_it_says(tmp_path: Path, fault: str, sentence: str) -> None:
    with faults(fault), pytest.raises(RemoteError, match=sentence):
        Store(f"faulty://{tmp_path}").write("small", b"content")


def test_a_store_that_never_answers_is_waited_for_a_limited_time(tmp_path: Path) -> None:
    store, file, began = Store(f"faulty://{tmp_path}", timeout=0.2), tmp_path / "file", time.monotonic()
    file.write_bytes(b"content")
    sentence = r"must answer, but has not for 0\.2 s; check the network\.$"
    with faults("waits"):
        with pytest.raises(RemoteError, match=sentence):
            store.write("small", b"content")
        with pytest.raises(RemoteError, match=sentence):
            store.put(file, "large")
    assert time.monotonic() - began < 10
    assert Faulty.fault == ""


def test_a_part_of_a_file_has_its_time_however_soon_a_small_request_must_be_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that wait for one that reads are told of each second of it."""
    read = Faulty.cat_file

    def slow(files: Faulty, *arguments: object, **named: object) -> bytes:
        time.sleep(0.6)
        return bytes(read(files, *arguments, **named))

    (tmp_path / "file").write_bytes(b"content")
    store = Store(f"faulty://{tmp_path}", timeout=0.3)
    monkeypatch.setattr(Faulty, "cat_file", slow)
    assert received(store, "file", expected_of(b"content")) == b"content"
    with pytest.raises(RemoteError, match=r"has not for 0\.3 s"):
        store.read("file")
    monkeypatch.setattr(far_store, "TIMEOUT_SECONDS", 0.2)
    with pytest.raises(RemoteError, match=r"has not for 0\.2 s"):
        received(store, "file", expected_of(b"content"))


def test_a_real_s3_server_keeps_what_was_put_there(s3: str, tmp_path: Path) -> None:  # noqa: F811
    store, content = Store(f"{s3}/run"), b"0123456789" * 1_700_000  # two parts
    (tmp_path / "file").write_bytes(content)
    store.put(tmp_path / "file", "a/large")
    store.write("a/small", b"small")
    assert store.sizes("a") == {"a/large": 17_000_000, "a/small": 5}
    assert received(store, "a/large", expected_of(content)) == content
    assert (store.read_if_exists("none"), store.sizes("none")) == (None, {})
    before = store.version("a/small")
    store.write("a/small", b"other")
    assert store.version("a/small") != before
    store.remove("a/large")
    assert list(store.sizes("")) == ["a/small"]
    with pytest.raises(RemoteError, match=r"must be a place that exists, .*bucket does not exist"):
        Store("s3://another/run").write("small", b"content")


class EndsWhileOneLooks(Future[bytes]):
    """A request whose error comes right after it was waited for."""

    def done(self) -> bool:
        was_done = super().done()
        if not was_done:
            self.set_exception(OSError("no route to host"))
        return was_done


def test_a_request_that_fails_right_after_its_time_is_reported_as_one_without_an_answer() -> None:
    with pytest.raises(RemoteError, match="must answer, but has not for 2 s; check the network"):
        Store("memory://store")._result(EndsWhileOneLooks(), 2)


@pytest.mark.parametrize("follows", ["write", "remove"])
def test_a_write_that_was_given_up_does_not_arrive_after_what_follows(tmp_path: Path, follows: str) -> None:
    store = Store(f"faulty://{tmp_path}", timeout=0.3)
    with faults("waits", times=1):
        with pytest.raises(RemoteError, match=r"must answer, but has not for 0\.3 s"):
            store.write("latest", b"older")
        with pytest.raises(RemoteError, match=r"must answer, but has not for 0\.3 s"):
            store.write("latest", b"newer")
    store.timeout = 60.0  # on a busy machine, too
    store.write("latest", b"newer") if follows == "write" else store.remove("latest")
    time.sleep(0.5)
    assert store.read_if_exists("latest") == (b"newer" if follows == "write" else None)


def test_a_server_that_ignores_range_requests_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(far_store, "BLOCK", 1000)
    contents = {"small": bytes(1000), "large": bytes(1001)}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SilentHandler, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        store = Store(f"http://127.0.0.1:{server.server_port}")
        assert received(store, "small", expected_of(contents["small"])) == contents["small"]
        with pytest.raises(RemoteError, match="large` must be readable in parts, but its server ignores range request"):
            received(store, "large", expected_of(contents["large"]))
    finally:
        server.shutdown()
        server.server_close()


class SilentHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def test_a_server_that_gives_no_size_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store("memory://sizes")
    monkeypatch.setattr(store._files, "info", lambda path: {"size": None})
    monkeypatch.setattr(store._files, "find", lambda path, detail: {f"{path}/file": {"size": None}})
    for ask in (store.size, store.sizes):
        with pytest.raises(RemoteError, match="must have a size, but its server gives none"):
            ask("file")
