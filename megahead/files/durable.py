"""Files that are on disk when a call returns, and their checksums."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def fsync(path: Path) -> None:
    """Waits until a file's bytes, or a folder's list of names, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, text: str) -> None:
    """Writes a small text file, whose bytes are on disk on return (its name only after `fsync` of the folder)."""
    path.write_text(text, encoding="utf-8")
    fsync(path)


def sha256_of(path: Path) -> str:
    """Checksum of a file's content; reads all of it, about 1 GB a second."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
