"""Checkpoints of a run in an object store: whose they are, which ones count, what is reported."""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from megahead.checkpoints.folders import MANIFEST, Manifest, abandoned_in, is_step_folder, step_of, steps_in
from megahead.distributed.group import Group
from megahead.errors import CheckpointError, UserError
from megahead.files import write_atomically
from megahead.remote_files import PATIENCE, Store, is_below, joined
from megahead.run_folder import RunFolder

# A run's folder in a store: which checkpoints it has.


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


# What becomes of the checkpoints that a mirror is offered, for the log and the console.


@dataclass(frozen=True)
class News:
    """What became of a checkpoint, or of the small files."""

    facts: dict[str, Any]
    """For the log: its `step`; `seconds` and `bytes` if it arrived, else why it `failed`, or that it was `skipped`."""

    sentence: str | None = None
    """For the console, if something is wrong."""


def arrived(step: int, seconds: float, sent: int) -> News:
    return News({"step": step, "seconds": round(seconds, 3), "bytes": sent})


def failed(step: int, folder: object, reason: str) -> News:
    sentence = f"step {step:,} is not in the mirror, only in {folder}: {reason}"
    return News({"step": step, "failed": reason}, sentence)


def skipped(step: int, url: str) -> News:
    sentence = f"step {step:,} is not copied to the mirror, since an older one is still on its way to {url}"
    return News({"step": step, "skipped": True}, sentence)


def log_failed(reason: str) -> News:
    return News({"failed": reason}, f"the run's log is not in the mirror: {reason}")


# What a run has abandoned, but its mirror still has: written down on its disk, lest a later session fetch it.
#
# A run that goes back to an older checkpoint removes newer ones from its mirror with the first one that it sends.
# Until then, and if nothing can be sent, the mirror's newest is of the abandoned history; it may be nowhere else.


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


# What a session abandons in its mirror with its first save, from then until it is gone there.


class Abandonment:
    """Of a session that begins with the checkpoint of step `tip`: until it has saved one of its own, it may yet go on
    from newer ones in the mirror. Any thread may call `saved`; the mirror's calls the others."""

    def __init__(self, far: FarRun, folder: RunFolder, tip: int) -> None:
        self._far, self._folder, self._tip = far, folder, tip
        self._above: set[str] | None = None
        self._saved, self._noting = False, threading.Lock()

    @property
    def is_known(self) -> bool:
        """Whether the mirror could be read."""
        return self._above is not None

    def look(self) -> None:
        """Reads what is newer in the mirror; before the session sends anything. FarError if that cannot be read."""
        self._above = hashes_above(self._far, self._tip)
        with self._noting:
            self._write_down()

    def saved(self) -> None:
        """The session has saved a checkpoint. Written down at once: it may be long until that is sent, and the session
        be killed before."""
        with self._noting:
            self._saved = True
            self._write_down()

    def written_down(self) -> set[str]:
        """The hashes of what the mirror should not have any more, also by earlier sessions."""
        with self._noting:
            self._write_down()  # once more, if the disk was full
        return written_down(self._folder, self._far.url)

    def is_gone(self, hashes: set[str], and_newer: bool) -> None:
        """The mirror has none of `hashes` any more, which were written down; nor, with `and_newer`, what was newer."""
        with self._noting, suppress(OSError):
            if and_newer:
                self._above = set()
            forget(self._folder, self._far.url, hashes)

    def _write_down(self) -> None:
        if self._saved and self._above:
            with suppress(OSError):  # a full disk; most likely the checkpoint will be sent
                write_down(self._folder, self._far.url, self._above)


# Whose mirror it is: one run's, and at any time one session's.
#
# `run-id`, the same in the run's folder and in the mirror, keeps two runs from removing each other's checkpoints;
# `session`, as in the run's folder, says which of two processes that were cut off from each other may still write;
# `next-session`, which of them looked at the mirror last, and may become that: it takes a while from one to the other.


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
