"""Surveys a folder of text before it is preprocessed: which files can be read, and which keys have the text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megahead.data.records import Selection, TextFile, is_saved_dataset
from megahead.data.sources import ARCHIVES, CHUNKERS, SUFFIXES, Input, files_below, find_inputs, read_chunks
from megahead.errors import DataError
from megahead.wording import pluralize

MAX_SKIPPED_LINES = 5
SAVED_DATASET = "saved dataset"
PREFERRED_KEYS = ("text", "content")
"""Keys of the text of a file that has them; of another file, the key with the most characters."""


@dataclass(frozen=True)
class Survey:
    """What `megahead start` found in a folder or file."""

    name: str
    """Of the folder or file, without its path."""

    inputs: list[Input]
    keys: tuple[str, ...]
    """Keys of the text in records, as in `Selection`; empty if no input has records."""

    skipped: dict[Path, str]
    """Files that are left out, with the reason."""

    @property
    def bytes(self) -> int:
        """Size on disk."""
        return sum(item.bytes for item in self.inputs)

    def selection(self) -> Selection:
        return Selection(self.keys or "text")

    def text_bytes(self) -> float:
        """Approximate bytes of text: three times the size of a compressed file."""
        return sum(item.bytes * (3 if item.path.suffix in (".gz", ".zst", ".parquet") else 1) for item in self.inputs)

    def has_fewer_documents(self, limit: int) -> bool:
        """Whether there are fewer than `limit` documents; stops reading there."""
        count = 0
        for chunk in read_chunks(self.inputs, self.selection()):
            count += len(chunk.parse().texts)
            if count >= limit:
                return False
        return True

    def lines(self) -> list[str]:
        """The survey in lines for a terminal."""
        types = Counter(map(_type_name, self.inputs))
        summary = ", ".join(pluralize(number, name) for name, number in types.most_common())
        keys = f"; in records the text is in {' or '.join(f'`{key}`' for key in self.keys)}" if self.keys else ""
        skipped = [f"{file} {reason}" for file, reason in list(self.skipped.items())[:MAX_SKIPPED_LINES]]
        if (more := len(self.skipped) - MAX_SKIPPED_LINES) > 0:
            skipped.append(f"and {pluralize(more, 'other file')}")
        lines = [("text", f"{summary}, {self.bytes / 1e6:,.1f} MB{keys}")]
        lines += [("left out" if not n else "", line) for n, line in enumerate(skipped)]
        return [f"{name:<12}{line}" for name, line in lines]


def survey(path: Path, exclude: Path | None = None) -> Survey:
    """Surveys a file, or the files below a folder except those below `exclude`; DataError if none has text."""
    if not path.exists():
        raise DataError(f"`{path}` must be a folder or file of text, but does not exist; check the path.")
    is_folder = path.is_dir() and not is_saved_dataset(path)
    readable, unknown = files_below(path) if is_folder else ([path], [])
    if exclude is not None:
        excluded = exclude.resolve()
        readable, unknown = (
            [file for file in files if not file.parent.resolve().is_relative_to(excluded)]
            for files in (readable, unknown)
        )
    skipped = dict.fromkeys(unknown, f"does not end in {SUFFIXES}")
    inputs, bytes_by_key = list[Input](), Counter[str]()
    for file in readable:
        try:
            (item,) = find_inputs(file)
            characters = _characters_by_key(item)
        except DataError as error:
            skipped[file] = re.sub("^`[^`]*` ", "", str(error)).rstrip(".")  # without the path
            continue
        if not characters:
            skipped[file] = "has no text"
            continue
        inputs.append(item)
        key = next((key for key in PREFERRED_KEYS if characters[key]), characters.most_common(1)[0][0])
        bytes_by_key[key] += item.bytes
    if not inputs:
        first = next((f"`{file}` {reason}" for file, reason in skipped.items()), "it is empty")
        raise DataError(f"`{path}` must hold text, but {first}.")
    keys = [key for key, _ in bytes_by_key.most_common() if key != NO_KEY]
    return Survey(path.resolve().name, inputs, tuple(sorted(keys, key=lambda key: key not in PREFERRED_KEYS)), skipped)


def _type_name(item: Input) -> str:
    return next(
        (f"{suffix} file" for suffix in (*CHUNKERS, *ARCHIVES) if item.path.name.endswith(suffix)), SAVED_DATASET
    )


NO_KEY = ""
"""The key of texts that are not records."""


@dataclass(frozen=True)
class _CharacterCount(Selection):
    """Counts the characters under each key instead of reading a text."""

    characters: Counter[str] = field(default_factory=Counter)

    def text(self, record: Any) -> None:
        fields = {NO_KEY: record} if isinstance(record, str) else record
        for key, value in fields.items() if isinstance(fields, dict) else ():
            if isinstance(value, str) and not value.isspace():
                self.characters[key] += len(value)

    def columns(self, path: Path | str, names: Sequence[str]) -> list[str]:
        return list(names)


def _characters_by_key(item: Input) -> Counter[str]:
    """Characters under each key in the first chunk of an input. DataError for a truncated input: all types but plain
    JSON lines are read to their end."""
    selection = _CharacterCount()
    for number, chunk in enumerate(item.chunks(selection)):
        if not number:
            parsed = chunk.parse()
            if isinstance(chunk, TextFile):
                selection.characters[NO_KEY] += sum(map(len, parsed.require_texts()))
        if item.path.suffix == ".jsonl":
            break
    return +selection.characters
