"""The memory that this process may use: the machine's, or the lower limit of its job or container (Slurm, Kubernetes),
above which the kernel kills it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from megahead.files import read_if_exists

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_CGROUP_FILES = {
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
    "": ("memory.max", "memory.current", ("inactive_file", "active_file")),
}
"""By controller (cgroup v1, v2): the files of limit and usage, and the parts of usage that can be reclaimed."""


def available_memory() -> tuple[int, int]:
    """Available and total bytes: the node's, or fewer where this process is limited."""
    memory = psutil.virtual_memory()
    available, total = zip((memory.available, memory.total), *_limited_memory(), strict=True)
    return min(available), min(total)


def _limited_memory() -> Iterator[tuple[int, int]]:
    """Available bytes and limit of each cgroup of this process, from its own to the root that it sees."""
    for line in (read_if_exists(_OWN_CGROUPS) or b"").decode().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in _CGROUP_FILES.keys() & {*controllers.split(",")}:
            limit_file, usage_file, reclaimable = _CGROUP_FILES[controller]
            root = _CGROUPS / controller
            folder = root / path.lstrip("/")
            for group in (folder, *folder.parents[: len(folder.parts) - len(root.parts)]):
                with suppress(OSError, ValueError):  # no limit ("max"), or outside of the container
                    limit, usage = (int((group / name).read_text()) for name in (limit_file, usage_file))
                    pairs = (line.split() for line in (group / "memory.stat").read_text().splitlines())
                    usage -= sum(int(value) for name, value in pairs if name in reclaimable)
                    yield max(0, limit - usage), limit
