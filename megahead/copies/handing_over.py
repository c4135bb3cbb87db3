"""How ranks get copies from nodes whose ranks do not train: these put them into the run's folder, which all share."""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from megahead.checkpoint import find_checkpoint, step_of
from megahead.copies.node_memory import NodeMemory
from megahead.distributed import Launch
from megahead.run_folder import RunFolder

PATIENCE_SECONDS = 30.0
"""How long those that train wait for the others' copies."""


def hand_over(folder: RunFolder, launch: Launch) -> None:
    """Called by a rank beyond those that train: what is on its node of the last session's copies, newer than the
    checkpoints on disk, is put into the run's folder, if there is room. Others look for it there."""
    mark = mark_of(folder)
    if mark is None:
        return
    newest = find_checkpoint(folder.path)
    shared = NodeMemory.shared(folder)
    with suppress(OSError):
        for copy in NodeMemory.of(folder).copies(mark):
            if newest is None or step_of(copy) > step_of(newest):
                mine = shared.slot(mark, launch.rank)
                _put(copy, mine.with_name(f"{mine.name}-of-{copy.parent.name}"))
        done = _done(shared, mark, launch, launch.rank)
        done.parent.mkdir(parents=True, exist_ok=True)
        done.touch()


def _put(copy: Path, slot: Path) -> None:
    partial = slot / f".{copy.name}.partial"
    if not (slot / copy.name).exists():
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(copy, partial)
        partial.rename(slot / copy.name)


def wait_for_others(folder: RunFolder, mark: str, launch: Launch, most_seconds: float) -> None:
    """Waits until all ranks beyond those that train have handed over what they have, but not for long."""
    deadline = time.monotonic() + min(PATIENCE_SECONDS, most_seconds)
    for rank in range(launch.world_size, launch.world_size + launch.spare_ranks):
        done = _done(NodeMemory.shared(folder), mark, launch, rank)
        while not done.exists() and time.monotonic() < deadline:
            time.sleep(0.05)


def mark_of(folder: RunFolder) -> str | None:
    """That of the last session, unless it ended by itself."""
    try:
        return folder.holder.read_text(encoding="utf-8")
    except OSError:
        return None


def _done(shared: NodeMemory, mark: str, launch: Launch, rank: int) -> Path:
    """A file that says so, of one meeting of the ranks."""
    meeting = sha256(f"{launch.address} {launch.port} {launch.attempt}".encode()).hexdigest()[:16]
    return shared.slot(mark, rank).with_name(f"done-{meeting}-{rank}")
