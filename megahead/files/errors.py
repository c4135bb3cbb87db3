"""What can go wrong with a file, as a sentence that is an OSError, too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megahead.errors import UserError


class WriteError(UserError, OSError):
    """A file or folder that cannot be written: a full disk, no right to. `errno` is the system's."""

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(f"`{path}` must be writable, but is not: {error.strerror or error}; nothing was kept of it.")
        self.errno = error.errno


class InUseError(UserError):
    """Another process is writing that file."""


@contextmanager
def as_write_error(path: Path) -> Iterator[None]:
    """Turns what the system refuses inside into a WriteError of `path`."""
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        raise WriteError(path, error) from error
