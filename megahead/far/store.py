"""A place in an object store, through fsspec: every call ends, with an answer or with one sentence."""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from megahead.background import begin
from megahead.far.address import refuse_secrets, trimmed
from megahead.far.errors import FarError, told
from megahead.far.opening import has_folders, is_disk, open_url
from megahead.files import is_full

T = TypeVar("T")

PATIENCE = 60.0
"""Seconds that a store may take for one block, or one small request, its package's own retries included."""

BLOCK = 1 << 24
"""Bytes of a request for a part of a file."""

MOST_PARTS = 9_000
"""In which a file is sent; S3 takes 10,000."""

LANES = 4
"""Requests for parts of one file that are under way at once."""


class Store:
    """The files below `url`; their names are relative to it, with `/` between folders.

    FileNotFoundError for a file that is not there, FarError for anything else that goes wrong. Nothing is kept between
    two calls: what one of them reports is in the store then.
    """

    def __init__(self, url: str, patience: float = PATIENCE) -> None:
        """`patience`: seconds for a small request; parts of a file, of which is told while they are waited for, have
        PATIENCE."""
        refuse_secrets("URL", url)
        self.url, self.patience = trimmed(url), patience
        self._files, self._root = open_url(self.url)

    def sizes(self, folder: str) -> dict[str, int]:
        """All files below a folder, and the bytes of each; none for a folder that is not there."""
        try:
            found = self._asked(lambda: self._files.find(self._path(folder), detail=True))
        except FileNotFoundError:
            return {}
        return {self._name(path): int(info["size"]) for path, info in found.items()}

    def size(self, name: str) -> int:
        """Bytes of a file."""
        return int(self._asked(lambda: self._files.info(self._path(name)))["size"])

    def version(self, name: str) -> str:
        """What is another when the file was replaced, as far as the store tells."""
        info = self._asked(lambda: self._files.info(self._path(name)))
        return hashlib.sha256(str(info).encode()).hexdigest()

    def read(self, name: str) -> bytes:
        """A small file."""
        return bytes(self._asked(lambda: self._files.cat_file(self._path(name))))

    def read_if_there(self, name: str) -> bytes | None:
        """A small file; None where there is none."""
        try:
            return self.read(name)
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Puts a small file there, and reads it back; FarError if it differs then."""
        self._make_folder(name)
        self._sent(partial(self._put_whole, self._path(name), content))
        if self.read_if_there(name) != content:
            raise FarError(
                f"`{self.url}/{name}` must read back as it was written, but does not; the store loses writes."
            )

    def _put_whole(self, path: str, content: bytes) -> None:
        """On disks under another name first: one that is full would leave neither what was there nor this. Not by
        `files.staged`: what goes wrong is the store's to tell."""
        if not is_disk(self._files):
            self._files.pipe_file(path, content)
            return
        folder, _, name = path.rpartition("/")
        beside = f"{folder}/.{name}.partial"  # always the same: a killed session's is written over
        try:
            self._files.pipe_file(beside, content)
            with suppress(FileNotFoundError):  # lost, as reading it back tells
                Path(beside).replace(path)
        except BaseException:
            with suppress(OSError):
                Path(beside).unlink()
            raise

    def remove(self, name: str) -> None:
        """Removes a file, if it is there."""
        with suppress(FileNotFoundError):
            self._asked(lambda: self._files.rm_file(self._path(name)))

    def remove_folder(self, name: str) -> None:
        """Removes an empty folder, where the store has folders; one that is not empty, or not there, stays as it is."""
        if has_folders(self.url):
            with suppress(FileNotFoundError, FarError):
                self._asked(lambda: self._files.rmdir(self._path(name)))

    def put(self, path: Path, name: str) -> None:
        """Sends a file of any length, part by part; what arrived must still be checked. OSError if `path` cannot be
        read."""
        self._make_folder(name)
        part = max(BLOCK, -(-path.stat().st_size // MOST_PARTS))
        target = self._sent(lambda: self._files.open(self._path(name), "wb", block_size=part))
        try:
            with path.open("rb") as source:
                while block := source.read(part):
                    self._sent(partial(target.write, block))
            self._sent(target.close)
        except BaseException:
            begin(partial(_discard, target))
            raise

    def blocks(self, name: str, size: int) -> Iterator[bytes]:
        """The first `size` bytes of a file, in order, several parts under way at once. Yields b"" each second while it
        waits."""
        ranges = iter([(start, min(start + BLOCK, size)) for start in range(0, size, BLOCK)])
        under_way = deque(self._begin(name, *each) for each in islice(ranges, LANES))
        while under_way:
            yield from self._until_done(under_way[0])
            yield self._result(under_way.popleft(), PATIENCE)
            under_way.extend(self._begin(name, *each) for each in islice(ranges, 1))

    def _make_folder(self, name: str) -> None:
        if has_folders(self.url):
            folder = self._path(name).rpartition("/")[0]
            self._sent(lambda: self._files.makedirs(folder, exist_ok=True))

    def _begin(self, name: str, start: int, end: int) -> Future[bytes]:
        return begin(lambda: bytes(self._files.cat_file(self._path(name), start=start, end=end)))

    def _until_done(self, future: Future[bytes]) -> Iterator[bytes]:
        deadline = time.monotonic() + PATIENCE
        while not future.done() and time.monotonic() < deadline:
            with suppress(TimeoutError):
                future.exception(min(1.0, PATIENCE))
            if not future.done():
                yield b""

    def _asked(self, function: Callable[[], T]) -> T:
        future = begin(function)
        with suppress(TimeoutError):
            future.exception(self.patience)
        return self._result(future, self.patience)

    def _sent(self, function: Callable[[], T]) -> T:
        """Where what is not found is the place itself."""
        try:
            return self._asked(function)
        except FileNotFoundError as error:
            raise FarError(f"`{self.url}` must be a place that exists, but is none ({told(error)}).") from None

    def _result(self, future: Future[T], waited: float) -> T:
        if not future.done():
            raise FarError(f"`{self.url}` must answer, but has not for {waited:g} s; check the network.")
        error = future.exception()
        if isinstance(error, FileNotFoundError):
            raise error
        if error is not None and is_full(error):
            raise FarError(f"`{self.url}` must have room, but has none ({told(error)}); free some there.") from None
        if error is not None:
            raise FarError(
                f"`{self.url}` must be reachable, but is not ({told(error)}); check the address, the network, and the "
                "credentials in the environment."
            ) from None
        return future.result()

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _name(self, path: str) -> str:
        return path.removeprefix(self._root).lstrip("/")


def _discard(target: Any) -> None:
    """Gives a file up that is half sent; whatever becomes of that, nothing refers to it."""
    with suppress(Exception):
        target.discard()
