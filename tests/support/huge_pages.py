"""Memory in pages of 2 MiB: a fork copies, and its end drops, hundreds of entries in page tables instead of 150,000."""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

SIZE = 2**21
MADV_COLLAPSE = 25
"""Linux's, since 6.1; unlike other advice it holds for what is there now, and not for what is written later."""


def collapse_at_forks(every: int) -> None:
    """Collapses before each `every`-th fork of this process: what was written since the last time is cut up again."""
    owner, forks = os.getpid(), itertools.count(1)

    def before() -> None:
        if os.getpid() == owner and next(forks) % every == 0:
            collapse()

    os.register_at_fork(before=before)


def collapse() -> None:
    """Moves what this process has written so far into huge pages, where the kernel can do that."""
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
    for start, end in _heaps(Path("/proc/self/maps")):
        for page in range(-(-start // SIZE) * SIZE, end // SIZE * SIZE, SIZE):
            advise(page, SIZE, MADV_COLLAPSE)


def _heaps(maps: Path) -> Iterator[tuple[int, int]]:
    """Where memory lies that is private, writable and of no file."""
    for line in maps.read_text().splitlines() if maps.exists() else ():
        addresses, permissions, _, _, file, *name = line.split(maxsplit=5)
        if permissions == "rw-p" and file == "0" and name in ([], ["[heap]"]):
            start, end = (int(address, 16) for address in addresses.split("-"))
            yield start, end
