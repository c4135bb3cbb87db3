"""Whose mirror it is: one run's, and at any time one session's.

`run-id`, the same in the run's folder and in the mirror, keeps two runs from removing each other's checkpoints;
`session`, as in the run's folder, says which of two processes that were cut off from each other may still write.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from megahead.checkpoint import steps_in
from megahead.errors import CheckpointError, UserError
from megahead.far import Store, is_below
from megahead.files import write_atomically
from megahead.mirror.far_run import CHECKPOINTS, FarRun, newest_first
from megahead.run_folder import RunFolder


class TakenOverError(UserError):
    """Another session, or another run, writes to the mirror now."""


ID, SESSION = "run-id", "session"


def refuse_another_mirror(far: FarRun, folder: RunFolder, resume: str) -> None:
    """CheckpointError if the mirror belongs to another run than that in `folder`, which `resume` would go on with, or
    is that folder; FarError if what is written there cannot be read back."""
    _try_writing(far.store, folder)
    there, here = _id_in(far.store), _read(folder.identity)
    named = newest_first(far.list(CHECKPOINTS))
    if resume == "never" and named:
        raise CheckpointError(
            f"`--resume never` needs a mirror without checkpoints, but {far.url} has {named[0]}; choose another "
            "training.mirror."
        )
    fresh = not steps_in(folder.checkpoints)
    adopts = fresh and (resume in ("auto", "never") or is_below(resume, far.url))
    if there is None and named and not adopts:
        raise CheckpointError(
            f"`training.mirror` must be this run's or empty, but {far.url} has {named[0]}, and no {ID}; choose another."
        )
    if there is not None and there != here and not (here is None and adopts):
        raise CheckpointError(
            f"`training.mirror` must be this run's or empty, but {far.url} is that of another; choose another, or copy "
            f"its {ID} into {folder} if it is this run's after all."
        )


def _try_writing(store: Store, folder: RunFolder) -> None:
    name, token = f".tried-{secrets.token_hex(8)}", secrets.token_bytes(16)
    store.write(name, token)
    same = (folder / name).exists()
    store.remove(name)
    if same:
        raise CheckpointError(
            f"`training.mirror` must be another place than output_dir, but {store.url} is {folder}; choose another."
        )


def _id_in(store: Store) -> bytes | None:
    """None also for one that a full disk has left empty."""
    return store.read_if_there(ID) or None


class Claim:
    """A session's hold on a mirror; `mark` is the session's, in the run's folder."""

    def __init__(self, store: Store, folder: RunFolder, mark: str) -> None:
        self._store, self._folder, self._mark = store, folder, mark
        self._ours = self._was_ours = False

    def hold(self) -> bool:
        """Makes the mirror this run's and this session's, again if somebody has emptied it, and returns whether it was
        not; TakenOverError if it has become another's."""
        begins = not self._ours or self._is_forgotten()
        if begins:
            self._ours = False
            if self._was_ours:
                self.refuse_another()  # it may be begun again, but not taken again
            self._begin()
            self._was_ours = True
        self.refuse_another()
        self._ours = True
        return begins

    def _is_forgotten(self) -> bool:
        return self._store.read_if_there(SESSION) is None and _id_in(self._store) is None

    def refuse_another(self) -> None:
        """TakenOverError if another session has begun with this mirror."""
        there = self._store.read_if_there(SESSION)
        if there is not None and there != self._mark.encode():
            raise TakenOverError(
                f"training.mirror must have one session at a time, but with {self._store.url} another has begun on "
                f"{there.decode(errors='replace').strip()}; this one ends, and what it has not saved is the other's to "
                "do again."
            )

    def _begin(self) -> None:
        there, here = _id_in(self._store), _read(self._folder.identity)
        if there is not None and here is not None and there != here:
            raise TakenOverError(
                f"training.mirror must be this run's, but {self._store.url} has become that of another; choose another."
            )
        identity = there or here or f"{secrets.token_hex(16)}\n".encode()
        if here is None:
            write_atomically(self._folder.identity, identity)
        if there is None:
            self._store.write(ID, identity)
        self._store.write(SESSION, self._mark.encode())


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None
