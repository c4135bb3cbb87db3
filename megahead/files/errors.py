"""Errors in writing files: each is one sentence for the user, and an OSError too."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megahead.errors import UserError


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
