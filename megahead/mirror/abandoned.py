"""What a run has abandoned, but its mirror still has: written down on its disk, lest a later session fetch it.

A run that goes back to an older checkpoint removes newer ones from its mirror with the first one that it sends. Until
then, and if nothing can be sent, the mirror's newest is of the abandoned history; it may be nowhere else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from megahead.checkpoint import abandoned_in, steps_in
from megahead.checkpoint.manifest import MANIFEST
from megahead.files import write_atomically
from megahead.mirror.far_run import CHECKPOINTS, FarRun, newest_first, step_in
from megahead.run_folder import RunFolder

Lines = set[tuple[str, str]]
"""What is written down: hashes, each with the URL of its mirror."""


def hashes_above(far: FarRun, step: int) -> set[str]:
    """What tells the mirror's checkpoints above `step` from all others. FarError if it cannot be read."""
    return {_hash_of(far, name) for name in newest_first(far.list(CHECKPOINTS)) if step_in(name) > step} - {""}


def write_down(folder: RunFolder, url: str, hashes: Collection[str]) -> None:
    """Adds to those that the run in `folder` has abandoned in the mirror at `url`."""
    before = _lines(folder)
    _rewrite(folder, before, before | {(each, url) for each in hashes})


def written_down(folder: RunFolder, url: str) -> set[str]:
    """The hashes of those in the mirror at `url` that are written down."""
    return {each for each, where in _lines(folder) if where == url}


def forget(folder: RunFolder, url: str, hashes: Collection[str]) -> None:
    """The mirror at `url` has none of them any more."""
    before = _lines(folder)
    _rewrite(folder, before, before - {(each, url) for each in hashes})


def abandoned_by(folder: RunFolder) -> set[str]:
    """The hashes of all that the run in `folder` has abandoned: what is written down, and what is set aside on its
    disk; but not of what it has gone back to since."""
    here = folder.checkpoints
    return ({each for each, _ in _lines(folder)} | _hashes_in(abandoned_in(here))) - _hashes_in(steps_in(here))


def is_one_of(far: FarRun, name: str, abandoned: Collection[str]) -> bool:
    """Whether a checkpoint in the mirror is one of those."""
    return bool(abandoned) and _hash_of(far, name) in abandoned


def _hash_of(far: FarRun, name: str) -> str:
    """What tells a checkpoint in a store from all others: the SHA-256 of its manifest; the empty string if it is
    gone."""
    text = far.manifest_text(name)
    return "" if text is None else hashlib.sha256(text).hexdigest()


def _hashes_in(checkpoints: Collection[Path]) -> set[str]:
    hashes = set()
    for folder in checkpoints:
        with suppress(OSError):  # removed just now
            hashes.add(hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest())
    return hashes


def _lines(folder: RunFolder) -> Lines:
    with suppress(FileNotFoundError):
        text = folder.abandoned_far.read_text(errors="replace")
        return {(each, url) for each, _, url in (line.partition(" ") for line in text.splitlines()) if each}
    return set()


def _rewrite(folder: RunFolder, before: Lines, after: Lines) -> None:
    if not after:
        folder.abandoned_far.unlink(missing_ok=True)
    elif after != before:
        write_atomically(folder.abandoned_far, "".join(f"{each} {url}\n" for each, url in sorted(after)))
