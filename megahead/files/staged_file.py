"""A file that appears whole or not at all: written under another name, flushed to disk, renamed."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from megahead.files.durable import fsync
from megahead.files.errors import InUseError, as_write_error


class StagedFile:
    """`PATH.partial`, which becomes `PATH` on `publish` and vanishes on `discard`; for what is written over hours.

    A leftover of a killed run is overwritten. InUseError if another process is still writing it; WriteError for a
    failed write. On a file system without locks each process writes under its own name, and the last to publish wins.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with as_write_error(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = _open_locked(path.with_name(f"{path.name}.partial")) or _own_name(path).open("xb")
        self.partial = Path(self._file.name)

    def write(self, data: bytes) -> None:
        """Appends `data`."""
        with as_write_error(self.path):
            self._file.write(data)

    def sync(self) -> None:
        """Returns once everything that was written is on disk. After it, nothing can fail for lack of space."""
        with as_write_error(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())

    def publish(self) -> None:
        """Gives the file its name. Call `sync` first."""
        with as_write_error(self.path):
            self.partial.replace(self.path)
            self._file.close()
            fsync(self.path.parent)

    def discard(self) -> None:
        """Removes what was written, unless it was published."""
        if not self._file.closed:
            self.partial.unlink(missing_ok=True)
            with suppress(OSError):  # closing flushes, and the disk may be full
                self._file.close()


@contextmanager
def staged(path: Path) -> Iterator[Path]:
    """A temporary path for a file, which replaces `path` when the block succeeds, and is removed when it raises.
    Creates missing folders. If several processes do so at once, the last one's file stays. WriteError if the system
    refuses.
    """
    partial = _own_name(path)
    with as_write_error(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield partial
            fsync(partial)
            partial.replace(path)
            fsync(path.parent)
        finally:
            partial.unlink(missing_ok=True)


def write_atomically(path: Path, *parts: str | bytes) -> None:
    """Puts a whole file in place of `path`, on disk on return; text as UTF-8. See `staged`."""
    with staged(path) as partial, partial.open("xb") as file:
        for part in parts:
            file.write(part.encode() if isinstance(part, str) else part)


def _own_name(path: Path) -> Path:
    """A name beside `path` that no other process uses."""
    return path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")


def _open_locked(partial: Path) -> BinaryIO | None:
    """An empty file that no other process writes; None on a file system without locks (ENOSYS, ENOLCK, ENOTSUP)."""
    while True:
        file = partial.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise InUseError(
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
        file.close()  # another process published or removed it between opening and locking: not ours to change


def _still_named(file: BinaryIO, path: Path) -> bool:
    """Whether `path` is this very file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
