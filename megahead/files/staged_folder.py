"""A folder that appears whole or not at all: written under another name, flushed to disk, renamed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megahead.errors import FieldError
from megahead.files.durable import fsync
from megahead.files.errors import as_write_error


@contextmanager
def staged_folder(output: Path, *, replaceable: str | None = None) -> Iterator[Path]:
    """An empty folder beside `output`, which takes its name when the block succeeds, and is removed when it raises.

    `output` must not exist, or be empty, or hold a file named `replaceable` (an earlier output of the same command,
    which is then replaced); FieldError otherwise. WriteError if the system refuses.
    """
    output = output.absolute()
    _check_free(output, replaceable)
    partial = output.with_name(f".{output.name}.partial")
    with as_write_error(output):
        try:
            _remove(partial)
            partial.mkdir(parents=True)
            yield partial
            _publish(partial, output)
        finally:
            _remove(partial)


def _check_free(output: Path, replaceable: str | None) -> None:
    if not output.exists() or (replaceable and (output / replaceable).is_file()):
        return
    if not output.is_dir() or any(output.iterdir()):
        hint = "remove it or name another folder"
        raise FieldError("--output", "be a new folder", got=f"{output}, which exists", hint=hint)


def _publish(partial: Path, output: Path) -> None:
    for path in partial.rglob("*"):
        fsync(path)
    fsync(partial)
    replaced = output.with_name(f".{output.name}.replaced")
    _remove(replaced)
    if output.exists():
        output.rename(replaced)
    partial.rename(output)
    fsync(output.parent)
    _remove(replaced)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
