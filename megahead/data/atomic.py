"""Files that appear whole or not at all: written beside, synced to disk, renamed."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from megahead.errors import DataError


class InUseError(DataError):
    """Another process is writing that file."""


class StagedFile:
    """`PATH.partial`, which becomes `PATH` on `publish` and vanishes on `discard`.

    A leftover of a killed run is overwritten; one that another process is still writing is refused (DataError), and so
    is every failed write (a full disk, a folder that may not be written).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.partial = path.with_name(path.name + ".partial")
        with _told_as_data_error(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = _open_locked(self.partial)

    def write(self, data: bytes) -> None:
        """Appends `data`."""
        with _told_as_data_error(self.path):
            self._file.write(data)

    def sync(self) -> None:
        """Returns once everything written is on the disk: the last thing that can fail for want of space."""
        with _told_as_data_error(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())

    def publish(self) -> None:
        """Gives the file its name. Call `sync` first."""
        with _told_as_data_error(self.path):
            self.partial.replace(self.path)
            self._file.close()
            sync_folder(self.path.parent)

    def discard(self) -> None:
        """Removes what was written, unless it was published."""
        if not self._file.closed:
            self.partial.unlink(missing_ok=True)
            with suppress(OSError):  # closing flushes, and the disk may be full
                self._file.close()


def write_atomically(path: Path, data: bytes) -> None:
    """Puts a whole small file in place of `path`."""
    staged = StagedFile(path)
    try:
        staged.write(data)
        staged.sync()
        staged.publish()
    finally:
        staged.discard()


def sync_folder(folder: Path) -> None:
    """Makes renames and removals inside `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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


@contextmanager
def _told_as_data_error(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"`{path}` must be writable, but is not: {error.strerror}; nothing was kept of it.") from error
