"""Finds, checks and cuts into chunks what the user gave as input: files, globs, standard input, saved datasets.

A new kind of input is a chunk (`megahead.corpus.chunks`) and a function that cuts a file into such chunks, in `KINDS`.
"""

from __future__ import annotations

import glob
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from megahead.corpus.chunks import Chunk, JsonLines, TextFile
from megahead.corpus.decompression import STANDARD_INPUT, read_blocks
from megahead.corpus.selection import Selection
from megahead.errors import DataError

MAX_TEXT_BYTES = 1 << 30
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
Cutter = Callable[[Path, Selection], Iterator[Chunk]]


@dataclass(frozen=True)
class Input:
    """One file of text, or one saved dataset, or standard input."""

    path: Path

    files: tuple[Path, ...]
    """The files that are read for it, in order: several for a saved dataset, else only itself."""

    name: str
    """Its file name without the ending of its kind."""

    bytes: int
    """Its size on disk; 0 for standard input."""

    cut: Cutter

    def chunks(self, selection: Selection) -> Iterator[Chunk]:
        """Its chunks in order, about 4 MB of text each (more where one document is longer)."""
        for file in self.files:
            yield from self.cut(file, selection)


def find_inputs(patterns: str | Path | Sequence[str | Path]) -> list[Input]:
    """The inputs that a path or several, globs (`**` too) and `-` (standard input) stand for; those of a glob in order
    of name.

    DataError for what is missing or of an unknown kind.
    """
    patterns = [patterns] if isinstance(patterns, str | Path) else patterns
    if not patterns:
        raise DataError("there must be at least one input file, but none was given.")
    return [_input(path) for pattern in patterns for path in _paths(str(pattern))]


def total_bytes(inputs: Sequence[Input]) -> int | None:
    """Bytes of all inputs on disk; None if standard input is among them."""
    return None if any(item.path == STANDARD_INPUT for item in inputs) else sum(item.bytes for item in inputs)


def read_chunks(inputs: Sequence[Input], selection: Selection) -> Iterator[Chunk]:
    """The chunks of all inputs, one after the other."""
    for item in inputs:
        yield from item.chunks(selection)


def _paths(pattern: str) -> list[Path]:
    if Path(pattern).exists() or not glob.has_magic(pattern):
        return [Path(pattern)]
    found = sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207 (a Path cannot glob an absolute pattern)
    if not found:
        raise DataError(f"`{pattern}` must match a file, but matches none; check the pattern.")
    return [Path(path) for path in found]


def _input(path: Path) -> Input:
    if path == STANDARD_INPUT:
        return Input(path, (path,), "stdin", 0, _cut_json_lines)
    if path.is_dir():
        files = tuple(_tables().saved_dataset_files(path))
        return Input(path, files, path.name, sum(_size(file) for file in files), _cut_arrow)
    for ending, cut in KINDS.items():
        if path.name.endswith(ending):
            return Input(path, (path,), path.name.removesuffix(ending), _size(path), cut)
    raise DataError(f"`{path}` must end in one of {', '.join(KINDS)}, but does not; convert or rename it.")


def _size(path: Path) -> int:
    if not path.is_file():
        raise DataError(f"`{path}` must be a text file, but there is none; check the path.")
    return path.stat().st_size


def _cut_json_lines(path: Path, selection: Selection) -> Iterator[Chunk]:
    first_line, chunk_end, position = 1, 0, 0
    rest: list[bytes] = []
    for data, position in read_blocks(path):
        if first_line == 1 and not rest:
            data = data.removeprefix(BYTE_ORDER_MARK)
        head, newline, tail = data.rpartition(b"\n")
        if not newline:
            rest.append(tail)
            if sum(map(len, rest)) > MAX_TEXT_BYTES:
                raise DataError(f"`{path}:{first_line}` must be shorter than 1 GiB, but the line is longer; split it.")
            continue
        block = b"".join([*rest, head])
        rest = [tail]  # before the yield, so that the parts of a long document are freed
        yield JsonLines(str(path), first_line, block, selection, position - chunk_end)
        first_line += block.count(b"\n") + 1
        chunk_end = position
    if any(rest):
        yield JsonLines(str(path), first_line, b"".join(rest), selection, position - chunk_end)


def _cut_text(path: Path, selection: Selection) -> Iterator[Chunk]:
    parts: list[bytes] = []
    for data, _ in read_blocks(path):
        parts.append(data)
        if sum(map(len, parts)) > MAX_TEXT_BYTES:
            raise DataError(
                f"`{path}` must be shorter than 1 GiB, as a .txt file is one document, but is longer; "
                "turn it into .jsonl with one document a line."
            )
    yield TextFile(str(path), b"".join(parts), path.stat().st_size)


def _cut_parquet(path: Path, selection: Selection) -> Iterator[Chunk]:
    yield from _tables().cut_parquet(path, selection)


def _cut_arrow(path: Path, selection: Selection) -> Iterator[Chunk]:
    yield from _tables().cut_arrow(path, selection)


def _tables() -> ModuleType:
    """Imported only if there are tables: importing pyarrow takes longer than reading a small file of JSON lines."""
    return importlib.import_module("megahead.corpus.tables")


LINES_AND_TEXTS: dict[str, Cutter] = {".jsonl": _cut_json_lines, ".txt": _cut_text}
TABLES: dict[str, Cutter] = {".parquet": _cut_parquet, ".arrow": _cut_arrow}
KINDS = {f"{kind}{packed}": cut for kind, cut in LINES_AND_TEXTS.items() for packed in ("", ".gz", ".zst")} | TABLES
