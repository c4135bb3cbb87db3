"""Files that appear whole or not at all: written beside, synced to disk, renamed."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from megahead.errors import DataError


class StagedFile:
    """`PATH.partial`, which becomes `PATH` on `publish` and vanishes on `discard`.

    A leftover of a killed run is overwritten; one that another process is still writing is refused (DataError), and so
    is every failed write (a full disk, a folder that may not be written). `rivals`: others may be writing the same at
    the same time; each does so under a name of its own, and the last one to publish stays. So it is, too, where the
    file system has no locks to tell.
    """

    def __init__(self, path: Path, *, rivals: bool = False) -> None:
        self.path = path
        with _told_as_data_error(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = None if rivals else _open_locked(path.with_name(f"{path.name}.partial"))
            self._file = file or _open_own(path)
        self.partial = Path(self._file.name)

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


def write_atomically(path: Path, *parts: bytes) -> None:
    """Puts a whole file in place of `path`; of several processes that do so at once, the last one's stays."""
    staged = StagedFile(path, rivals=True)
    try:
        for part in parts:
            staged.write(part)
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


def _open_locked(partial: Path) -> BinaryIO | None:
    """An empty file that no other process writes; None on a file system without locks (ENOSYS, ENOLCK, ENOTSUP)."""
    while True:
        file = partial.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise DataError(
                f"`{partial}` must not be in use, but another process is writing it; wait for it to end."
            ) from None
        except OSError:
            file.close()
            with suppress(FileNotFoundError):
                if partial.stat().st_size == 0:  # made by this attempt
                    partial.unlink()
            return None
        if _still_named(file, partial):
            file.truncate(0)
            return file
        file.close()  # between opening and locking it was published, or removed: this is not ours to change


def _still_named(file: BinaryIO, path: Path) -> bool:
    """Whether `path` is this very file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _open_own(path: Path) -> BinaryIO:
    """A new file beside `path`, whose name no other process has."""
    return path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial").open("xb")


@contextmanager
def _told_as_data_error(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"`{path}` must be writable, but is not: {error.strerror}; nothing was kept of it.") from error
