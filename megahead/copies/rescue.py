"""What was in memory only becomes a checkpoint again: the newest copy that is whole on the nodes that are there."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megahead.checkpoint import Checkpoint, KeepRules, open_together, write_together
from megahead.checkpoint.manifest import FileEntry, Manifest
from megahead.copies.found import Found, Identity
from megahead.copies.handing_over import mark_of, wait_for_others
from megahead.copies.keeping import PARENT_STEP
from megahead.distributed import Group, Launch
from megahead.errors import CheckpointError
from megahead.files import fsync, sha256_of
from megahead.run_folder import RunFolder
from megahead.wording import counted


@dataclass(frozen=True)
class Rescue:
    """What came of the copies in memory."""

    checkpoint: Checkpoint | None
    """None: none can be used, for these `problems`."""

    newer_by: int = 0
    """Steps that it has more than the newest on disk."""

    seconds: float = 0.0
    """That it took."""

    problems: list[str] = field(default_factory=list)
    """A sentence for each newer copy, or file of one, that cannot be used."""

    def sentences(self) -> list[str]:
        """For people."""
        if self.checkpoint is None:
            return self.problems
        newer = f"step {self.checkpoint.step:,}, {counted(self.newer_by, 'step')} newer than the disk's"
        return [*self.problems, f"{newer}: saved as {self.checkpoint.folder.name} in {self.seconds:.1f} s"]

    def facts(self) -> dict[str, Any]:
        """For the log."""
        if self.checkpoint is None:
            return {"problems": self.problems}
        seconds = round(self.seconds, 3)
        return {"problems": self.problems, "newer_by": self.newer_by, "rescue_seconds": seconds}


def rescue_newer(
    than: int, folder: RunFolder, launch: Launch, group: Group, keep: int, keep_rules: KeepRules
) -> Rescue | None:
    """Makes a checkpoint in `folder` of the newest whole copy, if one of the last session is newer than step `than`;
    None if there is none. Collective.

    Which session was the last one, its mark in the folder says: once another has begun, or it has ended by itself, its
    copies are worthless. Every file is verified where it lies, and each rank writes some of those on its node.
    """
    began = time.monotonic()
    mark = group.broadcast_object(mark_of(folder) if group.rank == 0 else None)
    if mark is None:
        return None
    wait_for_others(folder, mark, launch, group.timeout_seconds / 2)
    found = Found.of(mark, than, folder, group)
    offers = group.all_gather_objects({identity: set(files) for identity, files in found.sound.items()})
    problems = list(dict.fromkeys(each for rank in group.all_gather_objects(found.problems) for each in rank))
    for identity in sorted({identity for rank in offers for identity in rank}, reverse=True):
        try:
            manifest = _manifest(identity, found, group)
            mine = _share(identity, manifest, offers, found, group.rank)
            written = _write(manifest, mine, folder, group, keep, keep_rules)
            checkpoint = open_together(written, group)
        except CheckpointError as error:
            problems.append(str(error))
        else:
            return Rescue(checkpoint, identity[0] - max(than, 0), time.monotonic() - began, problems)
    return Rescue(None, problems=problems) if problems else None


def _manifest(identity: Identity, found: Found, group: Group) -> Manifest:
    """The copy's, on all ranks."""
    first = group.all_gather_objects(identity in found.manifests).index(True)
    sent = found.manifests[identity] if group.rank == first else None
    return next(each for each in group.all_gather_objects(sent) if each is not None)


def _share(
    identity: Identity, manifest: Manifest, offers: list[dict[Identity, set[str]]], found: Found, rank: int
) -> Mapping[str, Path]:
    """The files that `rank` writes; CheckpointError on all if nobody has some."""
    writers = {
        name: next((other for other, offer in enumerate(offers) if name in offer.get(identity, ())), None)
        for name in manifest.files
    }
    lost = [name for name, writer in writers.items() if writer is None]
    if lost:
        raise CheckpointError(
            f"a copy in memory must be whole to be used, but of that of step {manifest.step:,} {lost[0]} is on no node "
            "that is here."
        )
    return {name: found.sound[identity][name] for name, writer in writers.items() if writer == rank}


def _write(
    manifest: Manifest, mine: Mapping[str, Path], folder: RunFolder, group: Group, keep: int, keep_rules: KeepRules
) -> Path:
    def write(partial: Path) -> dict[str, FileEntry]:
        for name, path in mine.items():
            _copy(path, partial / name, manifest.files[name])
        return {name: manifest.files[name] for name in mine}

    state = dict(manifest.state)
    parent_step = state.pop(PARENT_STEP)
    return write_together(
        folder.checkpoints,
        manifest.step,
        write,
        total_bytes=sum(entry.bytes for entry in manifest.files.values()),
        tensors=manifest.tensors,
        state=state,
        config=manifest.config,
        group=group,
        keep=keep,
        keep_rules=keep_rules,
        parent_step=parent_step,
    )


def _copy(source: Path, target: Path, entry: FileEntry) -> None:
    shutil.copyfile(source, target)
    target.chmod(target.parent.stat().st_mode & 0o666)
    fsync(target)
    if sha256_of(target) != entry.sha256:
        raise CheckpointError(f"`{target}` must read back as it was written, but does not; check the disk.")
