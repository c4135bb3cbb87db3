"""Splits archives of text files (tar, zip) into chunks, one member after the other."""

from __future__ import annotations

import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import IO

from megahead.data.records import Chunk, Selection
from megahead.errors import DataError

MemberReader = Callable[[Path], Iterator[tuple[str, IO[bytes]]]]


def chunk_archive(
    path: Path, selection: Selection, chunkers: Mapping[str, Callable[[Path, Selection], Iterator[Chunk]]]
) -> Iterator[Chunk]:
    """The chunks of an archive's members, in its order, each split by its suffix; members of unknown types are ignored,
    as in a folder.

    Costs disk space for one member at a time, in a temporary folder. DataError if no member can be read.
    """
    read_members = next(read for suffix, read in ARCHIVES.items() if path.name.endswith(suffix))
    is_empty = True
    try:
        for name, content in read_members(path):
            suffix = next((suffix for suffix in chunkers if name.endswith(suffix)), None)
            if suffix is None or PurePosixPath(name).name.startswith("."):
                continue
            is_empty = False
            for chunk in _chunk_member(content, suffix, chunkers[suffix], selection):
                yield replace(chunk, path=f"{path}/{name}")
    except DataError as error:
        raise DataError(f"`{path}` must hold text that can be read, but does not: {error}") from error
    except (tarfile.TarError, zipfile.BadZipFile, OSError, EOFError, RuntimeError, zlib.error) as error:
        raise DataError(f"`{path}` must be readable to its end, but is not ({error}); unpack or repair it.") from error
    if is_empty:
        raise DataError(f"`{path}` must hold files that end in one of {', '.join(chunkers)}, but holds none.")


def _chunk_member(
    content: IO[bytes], suffix: str, split: Callable[[Path, Selection], Iterator[Chunk]], selection: Selection
) -> Iterator[Chunk]:
    with TemporaryDirectory() as folder:  # a table is read at many places, and a decompressor wants a file
        file = Path(folder, f"member{suffix}")
        with file.open("wb") as output:
            shutil.copyfileobj(content, output, 1 << 20)
        yield from split(file, selection)


def _tar_members(path: Path) -> Iterator[tuple[str, IO[bytes]]]:
    with tarfile.open(path, "r|*") as archive:
        for member in archive:
            if member.isfile() and (content := archive.extractfile(member)) is not None:
                yield member.name, content


def _zip_members(path: Path) -> Iterator[tuple[str, IO[bytes]]]:
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if not member.is_dir():
                with archive.open(member) as content:
                    yield member.filename, content


ARCHIVES: dict[str, MemberReader] = {
    ".tar": _tar_members,
    ".tar.gz": _tar_members,
    ".tgz": _tar_members,
    ".zip": _zip_members,
}
