"""A run's folder in a store: which checkpoints it has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from megahead.checkpoint import is_step_folder, step_of
from megahead.checkpoint.manifest import MANIFEST, Manifest
from megahead.distributed import Group
from megahead.far import PATIENCE, Store, joined
from megahead.files import write_atomically

CHECKPOINTS = "checkpoints"

Listing = dict[str, dict[str, int]]
"""Each folder of a checkpoint, as a name in the store: its files and their bytes."""


class FarRun:
    """A run folder, a folder of checkpoints, or one checkpoint (whose name then is "") at `url`."""

    def __init__(self, url: str, patience: float = PATIENCE) -> None:
        self.store = Store(url, patience)
        self.url = self.store.url

    def list(self, below: str = "") -> Listing:
        """All folders of checkpoints below a folder, with a name or without."""
        listing: Listing = {}
        for name, size in self.store.sizes(below).items():
            folder, _, file = name.rpartition("/")
            if (not folder and file == MANIFEST) or _may_be_checkpoint(folder):
                listing.setdefault(folder, {})[file] = size
        return listing

    def manifest_text(self, folder: str) -> bytes | None:
        """That of a checkpoint, as it is stored; None if it is not there."""
        return self.store.read_if_there(f"{folder}/{MANIFEST}".lstrip("/"))

    def manifest(self, folder: str) -> tuple[bytes, Manifest]:
        """That of a checkpoint, as it is stored and as it reads; CheckpointError if it is damaged."""
        name = f"{folder}/{MANIFEST}".lstrip("/")
        text = self.store.read(name)
        return text, Manifest.parse(text, joined(self.url, name))

    def take(self, *paths: Path) -> None:
        """Fetches small files of the run, by their names, as far as they are there."""
        write_all(self.contents(*paths))

    def contents(self, *paths: Path) -> dict[Path, bytes]:
        """What small files of the run hold, by their names, as far as they are there."""
        found = {path: self.store.read_if_there(path.name) for path in paths}
        return {path: content for path, content in found.items() if content is not None}

    def remove(self, folder: str, files: dict[str, int]) -> None:
        """Removes a checkpoint, its name first: nobody takes what is left for one."""
        for name in sorted(files, key=lambda name: name != MANIFEST):
            self.store.remove(f"{folder}/{name}")
        self.store.remove_folder(folder)


def write_all(contents: Mapping[Path, bytes]) -> None:
    for path, content in contents.items():
        write_atomically(path, content)


def patience_with(group: Group) -> float:
    """Seconds for one request while the other ranks of a group wait for the next few of them."""
    return min(PATIENCE, group.timeout_seconds / 8)


def newest_first(listing: Listing) -> list[str]:
    """The folders of checkpoints that have a name, the highest step first."""
    return sorted((folder for folder, files in listing.items() if MANIFEST in files), key=step_in, reverse=True)


def step_in(folder: str) -> int:
    """The step in a folder's name; -1 where it has none."""
    return step_of(Path(folder)) if is_step_folder(Path(folder)) else -1


def _may_be_checkpoint(folder: str) -> bool:
    path = PurePosixPath(folder)
    return is_step_folder(Path(folder)) and path.parent.as_posix() in (".", CHECKPOINTS) and not path.suffix
