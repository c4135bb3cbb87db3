"""Finds the inputs of preprocessing, and splits them into chunks of records."""

from __future__ import annotations

import codecs
import csv
import glob
import os
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import IO

import orjson

from megahead.data.compression import ARCHIVES, DECOMPRESSORS, STANDARD_INPUT, read_blocks
from megahead.data.records import (
    BLOCK_BYTES,
    DATASET_DICT_FILE,
    Chunk,
    HubSplit,
    JsonLines,
    Selection,
    TextFile,
    TextLines,
    chunk_arrow,
    chunk_parquet,
    is_hub_url,
    is_saved_dataset,
    saved_dataset_files,
)
from megahead.errors import DataError
from megahead.wording import format_names

# Inputs are files, globs, standard input, datasets saved by `save_to_disk` and datasets of the Hub. A new file type
# needs a subclass of `Chunk`, and in `CHUNKERS` a function that splits a file into such chunks.

MAX_TEXT_BYTES = 1 << 30
DAT_DIGITS = 16
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
Chunker = Callable[[Path, Selection], Iterator[Chunk]]


@dataclass(frozen=True)
class Input:
    """One file of text, or one saved dataset, or one shard of a dataset of the Hub, or standard input."""

    path: Path
    """The path; for a shard of the Hub only its name."""

    files: tuple[Path, ...]
    """The files to read, in order: several for a saved dataset, none for a shard of the Hub, else only `path`."""

    name: str
    """The file name without the suffixes of its type."""

    bytes: int
    """Size on disk; 0 if it is unknown (standard input, the Hub)."""

    split: Chunker

    url: str | None = None
    """The URL of a shard of the Hub; None for all others."""

    def chunks(self, selection: Selection) -> Iterator[Chunk]:
        """Its chunks in order, of about 4 MB of text each (more where one document is longer). `selection`: which
        records, and which of their keys."""
        for file in self.files or (self.path,):
            yield from self.split(file, selection)


def find_inputs(patterns: str | Path | Sequence[str | Path]) -> list[Input]:
    """The inputs of one or more files, folders (with their subfolders), globs (`**` too), `-` (standard input) or
    `hf://datasets/` URLs, each shard of which is an input. The files of a folder or glob are sorted by name.

    DataError for a missing file or an unknown file type.
    """
    patterns = [patterns] if isinstance(patterns, str | Path) else patterns
    if not patterns:
        raise DataError("there must be at least one input file, but none was given.")
    inputs: list[Input] = []
    for pattern in map(str, patterns):
        if not is_hub_url(pattern):
            inputs += map(_make_input, _expand_pattern(pattern))
            continue
        split = HubSplit.parse(pattern).pin()
        names = split.shard_names()
        for index, name in enumerate(names):
            chunker, url = partial(split.chunk_shard, index, len(names)), split.shard_url(index, len(names))
            inputs.append(Input(Path(name), (), name, 0, chunker, url))
    return inputs


def input_names(patterns: Sequence[str | Path]) -> str:
    """The inputs by the names of their files without paths, a folder by its own, a URL as it is."""
    names = list[str]()
    for pattern in map(str, patterns):
        if "://" in pattern:
            names.append(pattern)
        elif pattern == str(STANDARD_INPUT):
            names.append("standard input")
        elif Path(pattern).is_dir():
            names.append(Path(pattern).resolve().name)
        else:
            names += [path.name for path in _expand_pattern(pattern)]
    return format_names(names)


def pin_hub_revisions(patterns: str | Path | Sequence[str | Path]) -> list[str | Path]:
    """The same inputs, each dataset of the Hub at its present commit. DataError if the Hub does not give it."""
    patterns = [patterns] if isinstance(patterns, str | Path) else patterns
    return [HubSplit.parse(str(item)).pin().url if is_hub_url(str(item)) else item for item in patterns]


def total_bytes(inputs: Sequence[Input]) -> int | None:
    """Bytes of all inputs on disk; None if one of them is not a file."""
    is_known = all(item.path != STANDARD_INPUT and item.url is None for item in inputs)
    return sum(item.bytes for item in inputs) if is_known else None


def max_documents(inputs: Sequence[Input]) -> int | None:
    """An upper bound of the number of documents if files are documents; else None."""
    return len(inputs) if all(item.split is _chunk_text for item in inputs) else None


def read_chunks(inputs: Sequence[Input], selection: Selection) -> Iterator[Chunk]:
    """The chunks of all inputs, one after the other."""
    for item in inputs:
        yield from item.chunks(selection)


def files_below(folder: Path) -> tuple[list[Path], list[Path]]:
    """Two lists: files and saved datasets below `folder`, and files below it of unknown types. In each the files of a
    folder are sorted by name and precede those of its subfolders. Ignores hidden ones (`.name`). Follows links, and
    lists each folder and file once."""
    readable, unknown, visited = list[Path](), list[Path](), set[Path]()
    for name, subfolders, files in os.walk(folder, followlinks=True):
        current, resolved = Path(name), Path(name).resolve()
        if resolved in visited:
            subfolders.clear()
            continue
        visited.add(resolved)
        if is_saved_dataset(current):
            readable.append(current)
            subfolders.clear()
            continue
        subfolders[:] = sorted(subfolder for subfolder in subfolders if not subfolder.startswith("."))
        for file in sorted(file for file in files if not file.startswith(".")):
            path = current / file
            target = path.resolve() if path.is_symlink() else resolved / file
            if not file.endswith(tuple(CHUNKERS)):
                unknown.append(path)
            elif target not in visited:
                visited.add(target)
                readable.append(path)
    return readable, unknown


def _expand_pattern(pattern: str) -> list[Path]:
    if not pattern:  # an unset variable; Path("") is the working directory
        raise DataError("an input must be the name of a file or folder, but one is empty.")
    folder = Path(pattern)
    if _is_plain_folder(folder):
        if readable := files_below(folder)[0]:
            return readable
        raise DataError(f"`{folder}` must hold files that end in {SUFFIXES}, but holds none.")
    if Path(pattern).exists() or not glob.has_magic(pattern):
        return [Path(pattern)]
    matches = map(Path, sorted(glob.glob(pattern, recursive=True)))  # noqa: PTH207 (a Path globs no absolute pattern)
    paths = [path for match in matches for path in (files_below(match)[0] if _is_plain_folder(match) else [match])]
    if not paths:
        raise DataError(f"`{pattern}` must match a file, but matches none; check the pattern.")
    return list(dict.fromkeys(paths))  # `**` matches folders and what is in them


def _is_plain_folder(path: Path) -> bool:
    return path.is_dir() and not (is_saved_dataset(path) or (path / DATASET_DICT_FILE).is_file())


def _make_input(path: Path) -> Input:
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise DataError(f"`{path}` must have a path in UTF-8, but has not; rename it.") from None
    if path == STANDARD_INPUT:
        return Input(path, (path,), "stdin", 0, _chunk_lines)
    if path.is_dir():
        files = tuple(saved_dataset_files(path))
        return Input(path, files, path.name, sum(_file_bytes(file) for file in files), chunk_arrow)
    size = _file_bytes(path)
    for suffix, split in (CHUNKERS | dict.fromkeys(ARCHIVES, _chunk_archive)).items():
        if path.name.endswith(suffix):
            return Input(path, (path,), path.name.removesuffix(suffix), size, split)
    raise DataError(f"`{path}` must end in {SUFFIXES}, {', '.join(ARCHIVES)}, but does not; convert or rename it.")


def _text_suffix(path: Path) -> str:
    """The suffix of a file of text, without the one of its compression."""
    return Path(path.stem).suffix if path.suffix in DECOMPRESSORS else path.suffix


def _file_bytes(path: Path) -> int:
    if not path.is_file():
        raise DataError(f"`{path}` must be a text file, but there is none; check the path.")
    return path.stat().st_size


def _chunk_lines(path: Path, selection: Selection, chunk_class: type[Chunk] = JsonLines) -> Iterator[Chunk]:
    """Blocks of whole lines, without the last newline of each."""
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
        yield chunk_class(str(path), first_line, block, selection, position - chunk_end)
        first_line += block.count(b"\n") + 1
        chunk_end = position
    if any(rest):
        yield chunk_class(str(path), first_line, b"".join(rest), selection, position - chunk_end)


def _chunk_records(path: Path, selection: Selection, records: Iterable[tuple[int, bytes]]) -> Iterator[Chunk]:
    """Joins `records` (bytes of the file read so far, JSON line) to chunks."""
    first, chunk_end, position, lines, size = 1, 0, 0, list[bytes](), 0
    for position, line in records:
        lines.append(line)
        size += len(line)
        if size >= BLOCK_BYTES:
            yield JsonLines(str(path), first, b"\n".join(lines), selection, position - chunk_end)
            first, chunk_end, lines, size = first + len(lines), position, [], 0
    if lines:
        yield JsonLines(str(path), first, b"\n".join(lines), selection, position - chunk_end)


def _chunk_dat(path: Path, selection: Selection) -> Iterator[Chunk]:
    """The texts of a `.dat` file of lm_dataformat: each after its number of bytes, in 16 decimal digits."""

    def records() -> Iterator[tuple[int, bytes]]:
        number, rest = 1, b""
        for data, position in read_blocks(path):
            data, start = rest + data, 0
            while len(digits := data[start : start + DAT_DIGITS]) == DAT_DIGITS:
                where = f"`{path}:{number}`"
                if not digits.isdigit():
                    raise DataError(
                        f"{where} must begin with {DAT_DIGITS} digits, but is {digits!r} instead; repair it."
                    )
                if int(digits) > MAX_TEXT_BYTES:
                    raise DataError(f"{where} must be shorter than 1 GiB, but has {int(digits):,} bytes; split it.")
                end = start + DAT_DIGITS + int(digits)
                if end > len(data):
                    break
                yield position, orjson.dumps(data[start + DAT_DIGITS : end].decode(errors="replace"))
                start, number = end, number + 1
            rest = data[start:]
        if rest:
            raise DataError(f"`{path}:{number}` must have as many bytes as it says, but has not; it may be cut short.")

    yield from _chunk_records(path, selection, records())


def _chunk_text(path: Path, selection: Selection) -> Iterator[Chunk]:
    if selection.splits_text_files and _text_suffix(path) == ".txt":
        yield from _chunk_lines(path, selection, TextLines)
        return
    yield TextFile(str(path), 1, _read_whole(path, "one document"), selection, path.stat().st_size)


def _chunk_json(path: Path, selection: Selection) -> Iterator[Chunk]:
    """The items of a JSON array, or else JSON lines. Lines are read in blocks."""
    try:
        is_lines = _begins_with_object(path)
        items = None if is_lines else orjson.loads(_read_whole(path, "read at once").removeprefix(BYTE_ORDER_MARK))
    except orjson.JSONDecodeError:
        items = None
    if items is None:  # not in `except`, where the error would keep the file in memory
        yield from _chunk_lines(path, selection)
        return
    items, size = items if isinstance(items, list) else [items], path.stat().st_size
    records = ((size * number // len(items), orjson.dumps(item)) for number, item in enumerate(items, 1))
    yield from _chunk_records(path, selection, records)


def _begins_with_object(path: Path) -> bool:
    """Whether the first line is a whole JSON object."""
    start, _ = next(read_blocks(path), (b"", 0))
    line, newline, _ = start.removeprefix(BYTE_ORDER_MARK).lstrip().partition(b"\n")
    with suppress(orjson.JSONDecodeError):
        return bool(newline) and isinstance(orjson.loads(line), dict)
    return False


def _chunk_csv(path: Path, selection: Selection) -> Iterator[Chunk]:
    """The rows of a `.csv` or `.tsv` file, whose first line names the columns; blank lines are ignored."""
    position = complete_lines = 0

    def text_lines() -> Iterator[str]:
        nonlocal position
        rest, decoder = "", codecs.getincrementaldecoder("utf-8-sig")()
        for data, read in read_blocks(path):
            position = read
            *complete, rest = (rest + decoder.decode(data)).split("\n")
            yield from (f"{line}\n" for line in complete)
            if len(rest) > MAX_TEXT_BYTES:
                raise csv.Error(f"line {reader.line_num + 1} is longer than 1 GiB")
        yield rest + decoder.decode(b"", final=True)
        if reader.line_num > complete_lines:  # the reader would take all that follows the quotes for one field
            raise csv.Error(f"the quotes that begin in line {complete_lines + 1} do not end")

    def read_rows() -> Iterator[list[str]]:
        nonlocal complete_lines
        for row in reader:
            complete_lines = reader.line_num
            if row:
                yield row

    csv.field_size_limit(MAX_TEXT_BYTES)
    reader = csv.reader(text_lines(), delimiter="\t" if _text_suffix(path) == ".tsv" else ",")
    try:
        rows = read_rows()
        names = next(rows, [])
        columns = selection.columns(path, names)
        fields = (dict(zip(names, row, strict=False)) for row in rows)
        records = ((position, orjson.dumps({column: row.get(column) for column in columns})) for row in fields)
        yield from _chunk_records(path, selection, records)
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"`{path}` must be a table in UTF-8 text, but is not ({error}).") from error


def _read_whole(path: Path, reason: str) -> bytes:
    data = bytearray()
    for block, _ in read_blocks(path):
        data += block
        if len(data) > MAX_TEXT_BYTES:
            raise DataError(
                f"`{path}` must be shorter than 1 GiB, as a {_text_suffix(path)} file is {reason}, but is longer; "
                "turn it into .jsonl with one document a line."
            )
    return bytes(data)


_TEXT_CHUNKERS: dict[str, Chunker] = {
    ".jsonl": _chunk_lines,
    ".json": _chunk_json,
    ".txt": _chunk_text,
    ".md": _chunk_text,
    ".csv": _chunk_csv,
    ".tsv": _chunk_csv,
    ".dat": _chunk_dat,
}
CHUNKERS: dict[str, Chunker] = {
    f"{suffix}{compression}": split for suffix, split in _TEXT_CHUNKERS.items() for compression in ("", *DECOMPRESSORS)
} | {".parquet": chunk_parquet, ".arrow": chunk_arrow}
SUFFIXES = f"one of {', '.join(_TEXT_CHUNKERS)} (or these with .gz or .zst), .parquet, .arrow"

# Archives of files (tar, zip). They are read when named, but ignored in a folder of inputs.


def _chunk_archive(path: Path, selection: Selection) -> Iterator[Chunk]:
    """The chunks of an archive's members, in its order, each split by its suffix; members of unknown types are ignored,
    as in a folder.

    Costs disk space for one member at a time, in a temporary folder. DataError if no member can be read.
    """
    read_members = next(read for suffix, read in ARCHIVES.items() if path.name.endswith(suffix))
    is_empty, position = True, 0
    try:
        with path.open("rb") as archive:
            for name, content in read_members(archive):
                suffix = next((suffix for suffix in CHUNKERS if name.endswith(suffix)), None)
                if suffix is None or any(part.startswith(".") for part in PurePosixPath(name).parts if part != ".."):
                    continue
                is_empty = False
                for chunk in _chunk_member(content, f"{path}/{name}", suffix, selection):
                    disk_bytes = max(0, archive.tell() - position)  # a member's first chunk counts all of it
                    position += disk_bytes
                    yield replace(chunk, disk_bytes=disk_bytes)
    except DataError as error:
        raise DataError(f"`{path}` must hold text that can be read, but does not: {error}") from error
    except (tarfile.TarError, zipfile.BadZipFile, UnicodeError, OSError, EOFError, RuntimeError, zlib.error) as error:
        raise DataError(f"`{path}` must be readable to its end, but is not ({error}); unpack or repair it.") from error
    if is_empty:
        raise DataError(f"`{path}` must hold visible files that end in one of {', '.join(CHUNKERS)}, but holds none.")


def _chunk_member(content: IO[bytes], path: str, suffix: str, selection: Selection) -> Iterator[Chunk]:
    """The chunks of an archive's member, which errors name by `path`."""
    with TemporaryDirectory() as folder:  # tables need random access, and decompressors need a file
        file = Path(folder, f"member{suffix}")
        with file.open("wb") as output:
            shutil.copyfileobj(content, output, 1 << 20)
        try:
            for chunk in CHUNKERS[suffix](file, selection):
                yield replace(chunk, path=path)
        except DataError as error:
            raise DataError(str(error).replace(str(file), path)) from error
