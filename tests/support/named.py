"""Checkpoints by their steps, whatever digits their names have."""

from __future__ import annotations

import re
from pathlib import Path

from megahead.checkpoints.disk import DiskStorage
from megahead.checkpoints.store import is_checkpoint_name, step_of


def folder_of(place: Path, step: int) -> Path:
    """The only checkpoint of a step in a run folder, a store's, or one of checkpoints."""
    (folder,) = (place / name for name in folders_in(place) if step_of(name) == step)
    return folder


def folders_in(place: Path) -> list[str]:
    """Paths of all that have a name below a folder."""
    return [str(path.relative_to(place)) for path in sorted(place.glob("**/step-*")) if is_checkpoint_name(path.name)]


def steps_of_history(place: Path) -> list[int]:
    """Steps of the newest one and of what led to it, ascending."""
    return sorted(map(step_of, DiskStorage.of(place).history()))


def orphaned_steps(place: Path) -> list[int]:
    """Steps of the others, ascending."""
    return sorted(map(step_of, DiskStorage.of(place).orphans()))


def without_digits(text: str) -> str:
    """A text that names checkpoints, without the digits that differ each time."""
    return re.sub(r"(step-\d{8})-[0-9a-f]{6}", r"\1", text)
