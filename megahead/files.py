"""Files and folders that appear whole or not at all, and are on disk when a call returns."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from megahead.errors import FieldError, UserError

# Files that are on disk when a call returns, and their checksums.


def fsync(path: Path) -> None:
    """Waits until a file's bytes, or a folder's list of names, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """Checksum of a file's content; reads all of it, about 1 GB a second."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_if_exists(path: Path) -> bytes | None:
    """A file's content; None where there is none, or it cannot be read just now."""
    try:
        return path.read_bytes()
    except OSError:
        return None


# Errors in writing files: each is one sentence for the user, and an OSError too.


class WriteError(UserError, OSError):
    """A file or folder that cannot be written: the disk is full, or permission is missing. `errno` is the system's."""

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(f"`{path}` must be writable, but is not: {error.strerror or error}; nothing was kept of it.")
        self.errno = error.errno


class InUseError(UserError):
    """Another process is writing that file."""


def is_full(error: BaseException) -> bool:
    """Whether a disk or a quota is full, by the system's code."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def as_write_error(path: Path) -> Iterator[None]:
    """Turns an OSError inside of the block into a WriteError about `path`."""
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        raise WriteError(path, error) from error


# A file that appears whole or not at all: written under another name, flushed to disk, renamed.


class AtomicFile:
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
def atomic_path(path: Path) -> Iterator[Path]:
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
    """Puts a whole file in place of `path`, on disk on return; text as UTF-8. See `atomic_path`."""
    with atomic_path(path) as partial, partial.open("xb") as file:
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


# A folder that appears whole or not at all: written under another name, flushed to disk, renamed.


@contextmanager
def atomic_folder(output: Path, *, replaceable: str | None = None) -> Iterator[Path]:
    """An empty folder beside `output`, which takes its name when the block succeeds, and is removed when it raises.

    `output` must not exist, or be empty, or hold a file named `replaceable` (an earlier output of the same command,
    which is then replaced); FieldError otherwise. WriteError if the system refuses.
    """
    output = output.absolute()
    is_old = replaceable is not None and (output / replaceable).is_file()
    if output.exists() and not is_old and (not output.is_dir() or any(output.iterdir())):
        hint = "remove it or name another folder"
        raise FieldError("--output", "be a new folder", got=f"{output}, which exists", hint=hint)
    partial = output.with_name(f".{output.name}.partial")
    with as_write_error(output):
        try:
            _remove(partial)
            partial.mkdir(parents=True)
            yield partial
            for path in partial.rglob("*"):
                fsync(path)
            publish_folder(partial, output)
        finally:
            _remove(partial)


def publish_folder(partial: Path, output: Path) -> None:
    """Gives a folder, whose files are on disk, its name beside it; what had that name is removed."""
    fsync(partial)
    replaced = output.with_name(f".{output.name}.replaced.partial")
    _remove(replaced)
    if output.exists():
        output.rename(replaced)
    partial.rename(output)
    fsync(output.parent)
    _remove(replaced)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
