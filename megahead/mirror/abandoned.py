"""What a run has abandoned, but its mirror still has: written down on its disk, lest a later session fetch it.

A run that goes back to an older checkpoint removes newer ones from its mirror with the first one that it sends. Until
then, and if nothing can be sent, the mirror's newest is of the abandoned history; it may be nowhere else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection

from megahead.files import write_atomically
from megahead.mirror.far_run import CHECKPOINTS, FarRun, newest_first, step_in
from megahead.run_folder import RunFolder


def hashes_above(far: FarRun, step: int) -> set[str]:
    """What tells the mirror's checkpoints above `step` from all others. FarError if it cannot be read."""
    return {hash_of(far, name) for name in newest_first(far.list(CHECKPOINTS)) if step_in(name) > step}


def hash_of(far: FarRun, name: str) -> str:
    """What tells a checkpoint in a store from all others: the SHA-256 of its manifest; the empty string if it is
    gone."""
    text = far.manifest_text(name)
    return "" if text is None else hashlib.sha256(text).hexdigest()


def write_down(folder: RunFolder, hashes: Collection[str]) -> None:
    """Adds to those that the run in `folder` has abandoned."""
    if new := set(hashes) - {""} - written_down(folder):
        write_atomically(folder.abandoned_far, "".join(f"{each}\n" for each in sorted(written_down(folder) | new)))


def written_down(folder: RunFolder) -> set[str]:
    """All that the run in `folder` has abandoned."""
    return set(folder.abandoned_far.read_text().split()) if folder.abandoned_far.exists() else set()
