"""Whose mirror it is: one run's, and at any time one session's.

`run-id`, the same in the run's folder and in the mirror, keeps two runs from removing each other's checkpoints;
`session`, as in the run's folder, says which of two processes that were cut off from each other may still write;
`next-session`, which of them looked at the mirror last, and may become that: it takes a while from one to the other.
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


ID, SESSION, NEXT = "run-id", "session", "next-session"


def refuse_another_mirror(far: FarRun, folder: RunFolder, resume: str) -> bytes | None:
    """By what the run is known in the mirror, if it has begun there; CheckpointError if the mirror belongs to another
    run than that in `folder`, which `resume` would go on with, or is that folder; FarError if what is written there
    cannot be read back."""
    _try_writing(far.store, folder)
    there, here = _said(far.store, ID), _read(folder.identity)
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
    return there


def announce(store: Store, mark: str) -> None:
    """The session with this mark is the one that may take the mirror next."""
    store.write(NEXT, mark.encode())


def _said(store: Store, name: str) -> bytes | None:
    """None also for a file that a full disk has left empty."""
    return store.read_if_there(name) or None


def _try_writing(store: Store, folder: RunFolder) -> None:
    name, token = f".tried-{secrets.token_hex(8)}", secrets.token_bytes(16)
    store.write(name, token)
    same = (folder / name).exists()
    store.remove(name)
    if same:
        raise CheckpointError(
            f"`training.mirror` must be another place than output_dir, but {store.url} is {folder}; choose another."
        )


class Claim:
    """A session's hold on a mirror."""

    def __init__(self, store: Store, folder: RunFolder, mark: str, known_as: bytes | None) -> None:
        """`mark`: the session's, in the run's folder, and announced in the mirror; `known_as`: the run there then."""
        self._store, self._folder, self._mark, self._known_as = store, folder, mark, known_as
        self._ours = self._was_ours = False

    def hold(self) -> bool:
        """Makes the mirror this run's and this session's, again if somebody has emptied it, and returns whether it was
        not; TakenOverError if it has become another's."""
        begins = not self._ours or (_said(self._store, SESSION) is None and _said(self._store, ID) is None)
        if begins:
            self._ours = False
            self.refuse_another()
            self._begin()
            self._was_ours = True
        self.refuse_another()
        self._ours = True
        return begins

    def refuse_another(self) -> None:
        """TakenOverError if another session has begun with this mirror since it was this one's, or since this one was
        announced."""
        there = _said(self._store, SESSION if self._was_ours else NEXT)
        if there is not None and there != self._mark.encode():
            raise TakenOverError(
                f"training.mirror must have one session at a time, but with {self._store.url} another has begun on "
                f"{there.decode(errors='replace').strip()}; this one ends, and what it has not saved is the other's to "
                "do again."
            )

    def _begin(self) -> None:
        there, here = _said(self._store, ID), _read(self._folder.identity)
        if there is not None and there != (self._known_as if here is None else here):
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
