"""Stores for tests: a disk behind fsspec, one that misbehaves, and a real S3 server on this machine."""

from __future__ import annotations

import errno
import importlib.util
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from support.commands import free_port


class Faulty(LocalFileSystem):  # type: ignore[misc]
    """A disk that does to writes what `fault` says, for names that contain `only`; `faulty://PATH`."""

    protocol = "faulty"
    fault = ""
    only = ""
    times = 0
    """How often it still does so."""
    gate = threading.Event()
    """What a slow write waits for."""

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        return self._hurt(path) if "w" in mode and self._strikes(path) else super().open(path, mode, **options)

    def _strikes(self, path: str) -> bool:
        kind = type(self)
        if not kind.fault or kind.only not in path or not kind.times:
            return False
        kind.times -= 1
        return True

    def _hurt(self, path: str) -> Any:
        if self.fault == "fails":
            raise PermissionError(f"403 Forbidden: {path}")
        if self.fault == "is full":  # which empties what was there
            Path(self._strip_protocol(path)).write_bytes(b"")
            raise OSError(errno.ENOSPC, "No space left on device", path)
        if self.fault == "waits":
            self.gate.wait(30)
            return super().open(path, "wb")
        if self.fault == "loses":
            return Path("/dev/null").open("wb")
        return _Short(super().open(path, "wb"))


class _Short:
    """A file whose last byte does not arrive."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: bytes) -> int:
        self._file.write(data[:-1])
        return len(data)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> _Short:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


fsspec.register_implementation("faulty", Faulty, clobber=True)


@contextmanager
def faults(fault: str, only: str = "", times: int = 1_000_000) -> Iterator[None]:
    """Inside, writes to `faulty://` fail, find no room, are lost, are cut short, or wait (`fails`, `is full`, `loses`,
    `cuts`, `waits`)."""
    Faulty.fault, Faulty.only, Faulty.times = fault, only, times
    Faulty.gate.clear()
    try:
        yield
    finally:
        Faulty.gate.set()
        Faulty.fault = ""


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty bucket, in a server in a thread of this process; forked ranks find it through the
    environment."""
    missing = [name for name in ("s3fs", "moto", "flask", "flask_cors") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs an S3 server: {', '.join(missing)} not installed")
    import s3fs  # noqa: F401 - once, and not in each forked rank
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    port = free_port()
    server = ThreadedMotoServer("127.0.0.1", int(port), verbose=False)
    server.start()
    given = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": "testing", "AWS_REGION": "us-east-1"}
    for name, value in {**given, "AWS_SECRET_ACCESS_KEY": "not-to-be-told", "AWS_CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(name, value)
    bucket = f"bucket-{port}"  # another for each test: what servers of one process hold outlives them
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir(bucket)
    try:
        yield f"s3://{bucket}"
    finally:
        server.stop()
