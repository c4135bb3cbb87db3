"""Atomic writes of files and folders, which are on disk when a call returns."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from megahead.errors import FieldError, UserError


def fsync(path: Path) -> None:
    """Waits until a file, or a folder's list of names, is on disk."""
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
    """A file's content; None if it is missing or cannot be read."""
    try:
        return path.read_bytes()
    except OSError:
        return None


def read_json(path: Path) -> Any:
    """The content of a JSON file; None if it is missing, or cannot be read as one."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def read_json_object(path: Path) -> dict[str, Any]:
    """The content of a JSON file that holds an object; empty for any other file."""
    content = read_json(path)
    return content if isinstance(content, dict) else {}


def write_synced(file: BinaryIO, data: bytes) -> None:
    """Writes `data`, on disk on return. Call it for each block: one sync of a large file may take minutes."""
    file.write(data)
    file.flush()
    os.fsync(file.fileno())


COPY_BYTES = 1 << 24
"""Bytes that `copy_file` copies at a time."""


def copy_file(source_path: Path, target_path: Path) -> Iterator[None]:
    """Copies a file to a new one, on disk at the end; yields after each block."""
    with source_path.open("rb") as source, target_path.open("xb") as target:
        while block := source.read(COPY_BYTES):
            write_synced(target, block)
            yield


VISIBLE_SECONDS = 10.0
"""How long a network file system may take to show a file on other nodes."""


def wait_until_visible(path: Path, seconds: float) -> bool:
    """Waits at most `seconds` until `path`, which another node creates, exists; returns whether it does."""
    deadline = time.monotonic() + seconds
    while True:
        refresh_nfs(path)
        if path.exists():
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)


def refresh_nfs(path: Path) -> None:
    """Opens the folders of `path`, in which other nodes may have created it: clients of NFS remember for up to a minute
    that a file was missing, except in folders that are opened."""
    for folder in reversed(path.absolute().parents):
        with suppress(OSError):
            os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))


class WriteError(UserError, OSError):
    """A file or folder cannot be written: the disk is full, or permission is missing. `errno`: the OSError's."""

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(f"`{path}` must be writable, but is not: {error.strerror or error}; nothing was kept of it.")
        self.errno = error.errno


class InUseError(UserError):
    """Another process is writing the file."""


def is_full(error: BaseException) -> bool:
    """Whether `error` is an OSError for a full disk or quota."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def as_write_error(path: Path) -> Iterator[None]:
    """Turns an OSError in the block into a WriteError about `path`, unless it names a file that is read, or is none of
    the system's (without errno: a package's own, a timeout)."""
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        named = [Path(str(name)) for name in (error.filename, error.filename2) if name is not None]
        is_other = not any(_is_output(name, path) for name in named) if named else error.errno is None
        if is_other and not is_full(error):
            raise
        raise WriteError(path, error) from error


def _is_output(name: Path, path: Path) -> bool:
    """Whether `name` is `path`, a folder above it, or a temporary file or folder of it, or in one."""
    name, path = name.absolute(), path.absolute()
    return name in path.parents or any(
        beside.parent == path.parent and path.name in beside.name for beside in (name, *name.parents)
    )


class AtomicFile:
    """`PATH.partial`, which `publish` renames to `PATH` and `discard` removes; for files that are written over hours.

    Overwrites the partial file of a killed process. InUseError if another process is writing it; WriteError if a write
    fails. On a file system without locks each process has its own partial file, and the last to publish wins.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with as_write_error(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = _open_locked(path.with_name(f"{path.name}.partial")) or _unique_partial(path).open("xb")
        self.partial = Path(self._file.name)

    def write(self, data: bytes) -> None:
        """Appends `data`."""
        with as_write_error(self.path):
            self._file.write(data)

    def write_synced(self, data: bytes) -> None:
        """Appends `data`, on disk on return."""
        with as_write_error(self.path):
            write_synced(self._file, data)

    def sync(self) -> None:
        """Waits until all written data is on disk; afterwards nothing can fail for lack of space."""
        self.write_synced(b"")

    def publish(self) -> None:
        """Gives the file its name. Call `sync` first."""
        with as_write_error(self.path):
            self.partial.replace(self.path)
            self._file.close()
            fsync(self.path.parent)

    def discard(self) -> None:
        """Removes the partial file, unless it was published."""
        if not self._file.closed:
            self.partial.unlink(missing_ok=True)
            with suppress(OSError):  # closing flushes, and the disk may be full
                self._file.close()


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path for a file, which replaces `path` when the block succeeds, and is removed when it raises.
    Creates missing folders. With several concurrent writers the last one wins. WriteError for an OSError.
    """
    if not path.name:
        raise WriteError(path, IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)))
    partial = _unique_partial(path)
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
    """Replaces the file `path`, on disk on return; text as UTF-8. See `atomic_path`."""
    with atomic_path(path) as partial, partial.open("xb") as file:
        for part in parts:
            file.write(part.encode() if isinstance(part, str) else part)


def _unique_partial(path: Path) -> Path:
    """A temporary path next to `path` that no other process uses."""
    return path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")


def _open_locked(partial: Path) -> BinaryIO | None:
    """An empty, locked file; None on a file system without locks (ENOSYS, ENOLCK, ENOTSUP)."""
    while True:
        file = partial.open("ab")
        try:
            is_locked = _lock(file.fileno(), partial)
        except InUseError:
            file.close()
            raise
        if is_locked:
            file.truncate(0)
            return file
        file.close()
        if is_locked is None:
            with suppress(FileNotFoundError):
                if partial.stat().st_size == 0:  # made by this attempt
                    partial.unlink()
            return None


def _lock(descriptor: int, partial: Path) -> bool | None:
    """Locks an open file or folder. False if another process published or removed it meanwhile, so that it is no longer
    at `partial`; None on a file system without locks. InUseError if another process has locked it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        message = f"`{partial}` must not be in use, but another process is writing it; wait for it to end."
        raise InUseError(message) from None
    except OSError:
        return None
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), partial.stat())
    return False


@contextmanager
def atomic_folder(output: Path, *, replaceable: str | None = None, field: str = "--output") -> Iterator[Path]:
    """An empty folder next to `output`, which is renamed to it when the block succeeds, and removed when it raises.

    `output` must be missing, empty, or contain a file named `replaceable` (an earlier output of the same command, which
    is replaced) and no checkpoints that a training has put there since; FieldError about `field` otherwise. InUseError
    if another process is writing it; WriteError for an OSError. A link stays, and its target is written.
    """
    output = output.resolve()
    is_replaceable = replaceable is not None and (output / replaceable).is_file()
    is_replaceable = is_replaceable and not any(output.glob("checkpoint*"))
    if output.exists() and not is_replaceable and (not output.is_dir() or any(output.iterdir())):
        hint = "remove it or name another folder"
        raise FieldError(field, "be a new folder", got=f"{output}, which exists", hint=hint)
    partial = output.with_name(f".{output.name}.partial")
    with as_write_error(output), _locked_folder(partial):
        try:
            yield partial
            for path in partial.rglob("*"):
                fsync(path)
            publish_folder(partial, output)
        except BaseException:
            _remove(partial)
            raise


@contextmanager
def _locked_folder(partial: Path) -> Iterator[None]:
    """Creates or empties a folder, locked for the block. InUseError if another process has locked it; on a file system
    without locks the last process takes it over."""
    while True:
        partial.mkdir(parents=True, exist_ok=True)
        folder = os.open(partial, os.O_RDONLY)
        try:
            if _lock(folder, partial) is not False:
                for path in partial.iterdir():
                    _remove(path)
                yield
                return
        finally:
            os.close(folder)


def publish_folder(partial: Path, output: Path) -> None:
    """Renames a folder whose files are on disk to `output`, and removes an earlier `output`."""
    fsync(partial)
    replaced = output.with_name(f".{output.name}.replaced.partial")
    if output.exists():
        _remove(replaced)
        output.rename(replaced)
    try:
        partial.rename(output)
    except OSError:
        if replaced.exists():
            replaced.rename(output)
        raise
    fsync(output.parent)
    _remove(replaced)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
