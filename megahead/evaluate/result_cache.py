"""A JSON file of results, so that an interrupted comparison continues where it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megahead.errors import DataError
from megahead.files import write_atomically


class ResultCache:
    """Results, each under a key of everything that it depends on: read when opened, written atomically after each one.

    `path` None keeps them in memory only. DataError for a file that holds something else.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._entries: list[dict[str, Any]] = []
        if path is not None and path.exists():
            self._entries = _read(path)

    @property
    def entries(self) -> Sequence[dict[str, Any]]:
        """All results, in the order in which they were added."""
        return self._entries

    def find(self, key: Mapping[str, Any]) -> dict[str, Any] | None:
        """The entry that agrees with `key` in all its values, if there is one."""
        return next((entry for entry in self._entries if _agree(entry, key, key)), None)

    def add(self, key: Mapping[str, Any], values: Mapping[str, Any], *, replaces: Sequence[str]) -> None:
        """Stores `values` under `key`, and removes entries that agree with `key` in the names `replaces`."""
        self._entries = [entry for entry in self._entries if not _agree(entry, key, replaces)]
        self._entries.append({**key, **values})
        if self._path is not None:
            write_atomically(self._path, json.dumps({"results": self._entries}, indent=2) + "\n")


def fingerprint_model(folder: Path) -> str:
    """A fingerprint of a model's weights and settings, see `fingerprint_files`."""
    return fingerprint_files(sorted([*folder.glob("*.safetensors"), *folder.glob("*.json")]))


def fingerprint_files(paths: Sequence[Path]) -> str:
    """A fingerprint of the files' names, sizes and times; contents of many GB are not read."""
    seen = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return hashlib.sha256(repr(seen).encode()).hexdigest()[:16]


def _agree(entry: Mapping[str, Any], key: Mapping[str, Any], names: Sequence[str] | Mapping[str, Any]) -> bool:
    return all(entry.get(name) == key[name] for name in names)


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["results"]
    except (OSError, ValueError, KeyError, TypeError):
        entries = None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise DataError(f"`{path}` must hold results of this command, but does not; name another --output.")
    return entries
