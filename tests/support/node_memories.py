"""Nodes with a memory each, for ranks of one machine: a folder stands in place of /dev/shm."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

from megahead.checkpoints import memory as node_memory


def give_memory(folder: Path, node: int) -> Path:
    """From here on this process (and those it forks) is on that node, whose memory is in `folder`."""
    memory = memory_of(folder, node)
    memory.mkdir(exist_ok=True)
    node_memory.ROOT = memory
    return memory


def leave_room(free: int) -> None:
    """From here on this process sees so many free bytes in its node's memory, wherever it looks."""
    usage = shutil.disk_usage(node_memory.ROOT)._replace(free=free)
    seen = SimpleNamespace(**{**vars(shutil), "disk_usage": lambda _: usage})
    node_memory.shutil = seen  # type: ignore[assignment]


def memory_of(folder: Path, node: int) -> Path:
    return folder / f"memory-{node}"


def files_in(memory: Path) -> list[str]:
    """The files of copies there, without the run and the session that they belong to."""
    return sorted("/".join(path.parts[-3:]) for path in memory.rglob("*") if path.is_file())
