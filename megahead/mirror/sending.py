"""Sends a checkpoint: files beside, read back, then the name. What need not be kept there goes afterwards."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from megahead.background import begin
from megahead.checkpoint import KeepRules, step_of
from megahead.checkpoint.manifest import MANIFEST, FileEntry, Manifest
from megahead.checkpoint.retention import surplus
from megahead.errors import CheckpointError
from megahead.far import DamagedError, Expected, joined, receive
from megahead.mirror.abandoned import abandoned_by, is_one_of
from megahead.mirror.far_run import CHECKPOINTS, FarRun, Listing, newest_first, step_in
from megahead.run_folder import RunFolder

_AT_ONCE = 4
"""Files that are under way together."""


def send(far: FarRun, folder: Path, parent_step: int, refuse: Callable[[], None]) -> int:
    """Puts the checkpoint in `folder` into a mirror; returns the bytes sent. FarError, DamagedError if the store fails
    or has not kept what it was sent: then it has no name there.

    `parent_step`: that of the checkpoint which it continues; later ones are of a history that the run abandoned, as are
    others of which its disk tells that (`abandoned_by`), and lose their names before this one gets its own. `refuse` is
    called before that, and before each file; it raises an error if the mirror is another's now.
    """
    target, listing = _place_of(folder), far.list(CHECKPOINTS)
    text = (folder / MANIFEST).read_bytes()
    manifest = Manifest.parse(text, str(folder / MANIFEST))
    _clear_remains(far, listing, target)
    continued = step_in(target) <= parent_step  # else what has its name is of a history that was abandoned
    missing = _missing(far, target, listing.get(target, {}) if continued else {}, manifest)
    if missing and MANIFEST in listing.get(target, {}):
        far.store.remove(f"{target}/{MANIFEST}")
    sent = _send_files(far, folder, target, missing, refuse)
    _must_have(far, target, manifest)
    refuse()
    _abandon(far, listing, target, parent_step, abandoned_by(RunFolder.of(folder)))
    far.store.write(f"{target}/{MANIFEST}", text)
    return sent


def settle(far: FarRun, folder: Path, keep: int, keep_rules: KeepRules) -> None:
    """After `send`: what has lost its name goes. Unless newer ones are there, which the run may yet go on from,
    `latest` names the checkpoint, and what the rules do not keep goes, too."""
    target, listing = _place_of(folder), far.list(CHECKPOINTS)
    is_newest = newest_first(listing)[:1] == [target]
    if is_newest:
        far.store.write(f"{CHECKPOINTS}/latest", f"{folder.name}\n".encode())
    _clear_remains(far, listing, target)
    if is_newest:
        _retain(far, listing, target, keep, keep_rules)


def _place_of(folder: Path) -> str:
    return f"{CHECKPOINTS}/{folder.name}"


def _clear_remains(far: FarRun, listing: Listing, target: str) -> None:
    """Removes what has no name, but for what is written anew."""
    for folder, files in listing.items():
        if MANIFEST not in files and folder != target:
            far.remove(folder, files)


def _missing(far: FarRun, target: str, there: dict[str, int], manifest: Manifest) -> dict[str, FileEntry]:
    """Files to be sent: a checkpoint that is saved again (with the result of an evaluation, say) has the same ones."""
    known: dict[str, FileEntry] = {}
    if MANIFEST in there:
        try:
            known = far.manifest(target)[1].files
        except (CheckpointError, FileNotFoundError):
            known = {}
    same = {
        name for name, entry in manifest.files.items() if known.get(name) == entry and there.get(name) == entry.bytes
    }
    return {name: entry for name, entry in manifest.files.items() if name not in same}


def _send_files(far: FarRun, folder: Path, target: str, files: dict[str, FileEntry], refuse: Callable[[], None]) -> int:
    names = sorted(files, key=lambda name: files[name].bytes, reverse=True)
    lanes = [
        partial(_send_some, far, folder, target, {name: files[name] for name in names[k::_AT_ONCE]}, refuse)
        for k in range(_AT_ONCE)
    ]
    under_way: list[Future[None]] = [begin(lane) for lane in lanes]
    for each in under_way:
        each.exception()  # all have ended before one raises
    for each in under_way:
        each.result()
    return sum(entry.bytes for entry in files.values())


def _send_some(far: FarRun, folder: Path, target: str, files: dict[str, FileEntry], refuse: Callable[[], None]) -> None:
    """Sends files one after the other, and reads each back, whole: a store may lose what it has acknowledged."""
    for name, entry in files.items():
        refuse()  # the other's may have the same names
        far.store.put(folder / name, f"{target}/{name}")
        for _ in receive(far.store, f"{target}/{name}", Expected(entry.bytes, entry.sha256), len):
            pass


def _must_have(far: FarRun, target: str, manifest: Manifest) -> None:
    """DamagedError unless all files are there: somebody may have emptied the mirror meanwhile."""
    there = far.list(target).get(target, {})
    for name, entry in manifest.files.items():
        if there.get(name) != entry.bytes:
            place = joined(far.url, f"{target}/{name}")
            raise DamagedError(f"`{place}` must stay while its checkpoint is sent, but is gone.")


def _abandon(far: FarRun, listing: Listing, target: str, parent_step: int, abandoned: set[str]) -> None:
    for folder in newest_first(listing):
        if folder != target and (step_in(folder) > parent_step or is_one_of(far, folder, abandoned)):
            far.store.remove(f"{folder}/{MANIFEST}")  # its files go later: they are many, and the mirror's newest waits


def _retain(far: FarRun, listing: Listing, target: str, keep: int, keep_rules: KeepRules) -> None:
    others = [folder for folder in newest_first(listing) if folder != target]

    def read(folder: str) -> Manifest:
        return far.manifest(folder)[1]

    for folder in surplus(target, others, keep, keep_rules, lambda name: step_of(Path(name)), read):
        far.remove(folder, listing[folder])
