"""Looks through a folder of text before anything is made of it: what can be read, under which keys the text is."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megahead.data.records import Selection, TextFile
from megahead.data.sources import KINDS, SUFFIXES, Input, files_below, find_inputs, is_saved_dataset, read_chunks
from megahead.errors import DataError
from megahead.wording import pluralize

SHOWN = 5
SAVED = "saved dataset"
PREFERRED = ("text", "content")
"""Keys of text wherever a file has them; else that of the most characters."""


@dataclass(frozen=True)
class Survey:
    """What `megahead start` found in a folder or file."""

    inputs: list[Input]
    keys: tuple[str, ...]
    """Keys of the text in records, as `Selection` takes them; none where there are none."""

    skipped: dict[Path, str]
    """Why files are left out."""

    @property
    def bytes(self) -> int:
        """On disk."""
        return sum(item.bytes for item in self.inputs)

    def selection(self) -> Selection:
        return Selection(self.keys or "text")

    def text_bytes(self) -> float:
        """Of the text, about: compressed files hold three times as much."""
        return sum(item.bytes * (3 if item.path.suffix in (".gz", ".zst", ".parquet") else 1) for item in self.inputs)

    def has_fewer_documents(self, least: int) -> bool:
        """Whether there are fewer than `least`; reads no further than needed."""
        number = 0
        for chunk in read_chunks(self.inputs, self.selection()):
            number += len(chunk.parse().texts)
            if number >= least:
                return False
        return True

    def lines(self) -> list[str]:
        """What was found, for a terminal."""
        kinds = Counter(next((kind for kind in KINDS if item.path.name.endswith(kind)), SAVED) for item in self.inputs)
        named = {kind: kind if kind == SAVED else f"{kind} file" for kind in kinds}
        found = ", ".join(pluralize(number, named[kind]) for kind, number in kinds.most_common())
        keys = f"; in records the text is in {' or '.join(f'`{key}`' for key in self.keys)}" if self.keys else ""
        some = [f"{file} {why}" for file, why in list(self.skipped.items())[:SHOWN]]
        more = [f"and {pluralize(len(self.skipped) - SHOWN, 'other file')}"] if len(self.skipped) > SHOWN else []
        lines = [("text", f"{found}, {self.bytes / 1e6:,.1f} MB{keys}")]
        lines += [("left out" if not n else "", line) for n, line in enumerate([*some, *more])]
        return [f"{name:<12}{line}" for name, line in lines]


def survey(path: Path, without: Path | None = None) -> Survey:
    """Looks at the beginning of each file in `path`, but for those in `without`, and whether the rest can be read;
    DataError where none has text."""
    if not path.exists():
        raise DataError(f"`{path}` must be a folder or file of text, but does not exist; check the path.")
    inside = path.is_dir() and not is_saved_dataset(path)
    readable, others = files_below(path) if inside else ([path], [])
    if without is not None:
        apart = without.resolve()
        readable, others = ([f for f in files if apart not in _folders(f)] for files in (readable, others))
    skipped = dict.fromkeys(others, f"does not end in {SUFFIXES}")
    inputs, keys = list[Input](), Counter[str]()
    for file in readable:
        try:
            (item,) = find_inputs(file)
            sizes = _sizes(item)
        except DataError as error:
            skipped[file] = re.sub("^`[^`]*` ", "", str(error)).rstrip(".")  # without the path
            continue
        if not sizes:
            skipped[file] = "has no text"
            continue
        inputs.append(item)
        key = next((key for key in PREFERRED if sizes[key]), sizes.most_common(1)[0][0])
        keys[key] += item.bytes
    if not inputs:
        first = next((f"`{file}` {reason}" for file, reason in skipped.items()), "it is empty")
        raise DataError(f"`{path}` must hold text, but {first}.")
    found = sorted((key for key, _ in keys.most_common() if key != WHOLE), key=lambda key: key not in PREFERRED)
    return Survey(inputs, tuple(found), skipped)


def _folders(file: Path) -> tuple[Path, ...]:
    """Those that it lies in, links followed."""
    here = file.parent.resolve()
    return here, *here.parents


WHOLE = ""
"""The key of texts that are no records."""


@dataclass(frozen=True)
class _Sizes(Selection):
    """Counts characters under each key instead of choosing one."""

    characters: Counter[str] = field(default_factory=Counter)

    def text(self, record: Any) -> None:
        fields = {WHOLE: record} if isinstance(record, str) else record
        for key, value in fields.items() if isinstance(fields, dict) else ():
            if isinstance(value, str) and not value.isspace():
                self.characters[key] += len(value)

    def columns(self, path: Path, names: Sequence[str]) -> list[str]:
        return list(names)


def _sizes(item: Input) -> Counter[str]:
    """Characters under each key in the first chunk of an input, or of its whole text. DataError for one that breaks off
    later: lines and texts can be read where they begin, packed files and tables are read to their ends."""
    sizes = _Sizes()
    for number, chunk in enumerate(item.chunks(sizes)):
        if not number:
            parsed = chunk.parse()
            if isinstance(chunk, TextFile):
                sizes.characters[WHOLE] += sum(map(len, parsed.strict_texts()))
        if item.path.suffix == ".jsonl":
            break
    return +sizes.characters
