"""The peak memory of a piece of work in this process, which had better be a fork of its own."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest

NEEDS_PEAKS = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="needs a kernel that tells and resets a process's peak memory"
)


def peak_above(work: Callable[[], object]) -> tuple[int, int]:
    """Bytes that `work` took at most above what was there before it, and above what it left behind in its result."""
    freed_memory_goes_back()
    before = told("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    kept = work()
    most = told("VmHWM")
    after = told("VmRSS")
    del kept
    return most - before, most - after


def told(key: str) -> int:
    """Bytes of `VmRSS` (now), `VmHWM` (most since it was reset) or `VmData` (that may be written to, now)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def freed_memory_goes_back() -> None:
    """To the system, instead of staying on glibc's heap, so that what is measured is what is in use."""
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 2**20)  # M_MMAP_THRESHOLD
    libc.malloc_trim(0)
