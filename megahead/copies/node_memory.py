"""Where the copies of a run are on a node: ROOT/megahead-NAME-HASH/MARK/rank-R/step-N, with files of a checkpoint."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from megahead.checkpoint import steps_in
from megahead.errors import CheckpointError
from megahead.run_folder import RunFolder
from megahead.wording import gib

ROOT = Path("/dev/shm")
"""A file system in memory that all processes of a node share, and that outlives them."""

RESERVE = 0.1
"""Share of a node's memory that copies leave free."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_MOST_OF_NAME = 60


@dataclass(frozen=True)
class NodeMemory:
    """The folder of one run in the memory of this node. It need not exist."""

    folder: Path

    @staticmethod
    def of(run: RunFolder) -> NodeMemory:
        """By the place of the run's folder, so that runs beside each other do not mix."""
        place = run.path.resolve()
        digest = hashlib.sha256(os.fsencode(place)).hexdigest()[:12]
        return NodeMemory(ROOT / f"megahead-{place.name[:_MOST_OF_NAME]}-{digest}")

    @staticmethod
    def shared(run: RunFolder) -> NodeMemory:
        """Laid out alike, but on the disk that all nodes share."""
        return NodeMemory(run.handed_over)

    def node(self) -> str:
        """The same for all ranks that share this memory, and for no others."""
        try:
            boot, root = _BOOT.read_text(encoding="ascii").strip(), self.folder.parent.stat()
        except OSError:
            return socket.gethostname()
        return f"{boot} {root.st_dev} {root.st_ino}"

    def slot(self, mark: str, rank: int) -> Path:
        """Where a rank of the session with that mark keeps its copies."""
        return self._session(mark) / f"rank-{rank:05d}"

    def copies(self, mark: str) -> list[Path]:
        """The complete folders of all ranks of that session on this node."""
        slots = sorted(self._session(mark).glob("rank-*")) if self._is_ours() else []
        return [folder for slot in slots for folder in steps_in(slot)]

    def make(self) -> None:
        """Makes the folder, which only this user may read; CheckpointError if it is another's."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        if not self._is_ours():
            raise CheckpointError(f"`{self.folder}` must belong to this user, but does not; remove it.")

    def require_room(self, needed: int) -> None:
        """CheckpointError unless that many bytes more leave enough of the node's memory free."""
        memory = psutil.virtual_memory()
        there = shutil.disk_usage(ROOT).free
        room = max(0, min(there, int(memory.available - RESERVE * memory.total)))
        if needed > room:
            raise CheckpointError(
                f"{ROOT} on {socket.gethostname()} must have room for {gib(needed, 3)} of copies, but has "
                f"{gib(room, 3)} ({gib(there, 3)} free there, {gib(memory.available, 3)} of memory available); make "
                "it larger, or leave training.copy_every out."
            )

    def remove(self, mark: str | None = None) -> None:
        """All copies of the run on this node, or those of the session with that mark."""
        if self._is_ours():
            shutil.rmtree(self.folder if mark is None else self._session(mark), ignore_errors=True)
            with suppress(OSError):  # others' are there
                self.folder.rmdir()

    def _session(self, mark: str) -> Path:
        return self.folder / hashlib.sha256(mark.encode()).hexdigest()[:16]

    def _is_ours(self) -> bool:
        """Whether it is there, no link, and this user's: anyone may write to ROOT."""
        with suppress(OSError):
            there = self.folder.lstat()
            return there.st_uid == os.geteuid() and self.folder.is_dir() and not self.folder.is_symlink()
        return False
