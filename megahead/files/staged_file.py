"""A file that appears whole or not at all: written beside, flushed to disk, renamed."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from megahead.files.durable import flush
from megahead.files.errors import InUseError, told_as_write_error


class StagedFile:
    """`PATH.partial`, which becomes `PATH` on `publish` and vanishes on `discard`; for what is written over hours.

    A leftover of a killed run is overwritten; one that another process is still writing is refused (InUseError), and
    so is every failed write (WriteError).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.partial = _beside(path)
        with told_as_write_error(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = _open_locked(self.partial)

    def write(self, data: bytes) -> None:
        """Appends `data`."""
        with told_as_write_error(self.path):
            self._file.write(data)

    def sync(self) -> None:
        """Returns once everything written is on the disk: the last thing that can fail for want of space."""
        with told_as_write_error(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())

    def publish(self) -> None:
        """Gives the file its name. Call `sync` first."""
        with told_as_write_error(self.path):
            self.partial.replace(self.path)
            self._file.close()
            flush(self.path.parent)

    def discard(self) -> None:
        """Removes what was written, unless it was published."""
        if not self._file.closed:
            self.partial.unlink(missing_ok=True)
            with suppress(OSError):  # closing flushes, and the disk may be full
                self._file.close()


@contextmanager
def staged(path: Path) -> Iterator[Path]:
    """A path beside `path` to write a file to, which takes its place when the block ends well and vanishes when it
    raises. Folders above it are made. WriteError where the system refuses."""
    partial = _beside(path)
    with told_as_write_error(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield partial
            flush(partial)
            partial.replace(path)
            flush(path.parent)
        finally:
            partial.unlink(missing_ok=True)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Puts a whole small file in place of `path`, on disk on return; text as UTF-8."""
    with staged(path) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


def _open_locked(path: Path) -> BinaryIO:
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise InUseError(
            f"`{path}` must not be in use, but another process is writing it; wait for it to end."
        ) from None
    except OSError:  # a file system without locks
        pass
    file.truncate(0)
    return file
