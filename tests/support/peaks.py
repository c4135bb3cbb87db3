"""The peak memory of a piece of work in this process, which had better be a fork of its own."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest

TELLS_PEAKS = Path("/proc/self/clear_refs").exists()


def measures_peaks(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that has what it says from `peak_above`; it comes before others, whose freed memory would stay on
    glibc's heap as holes, and what fills a hole and is freed does not go back (measured: a fifth more)."""
    skipped = pytest.mark.skipif(not TELLS_PEAKS, reason="needs a kernel that tells and resets a process's peak memory")
    return pytest.mark.peaks(skipped(test))


def peak_above(work: Callable[[], object]) -> tuple[int, int]:
    """Bytes that `work` took at most above what was there before it, and above what it left behind in its result.

    Code that it is the first to read, or that the kernel had taken out of memory meanwhile, does not count.
    """
    freed_memory_goes_back()
    before, code = told("VmRSS"), told("RssFile")
    Path("/proc/self/clear_refs").write_text("5")
    kept = work()
    most = told("VmHWM")
    after, code_read = told("VmRSS"), told("RssFile") - code
    del kept
    return most - before - max(0, code_read), most - after


def told(key: str) -> int:
    """Bytes of `VmRSS` (now), `VmHWM` (most since it was reset) or `VmData` (that may be written to, now)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def freed_memory_goes_back() -> None:
    """To the system, instead of staying on glibc's heap, so that what is measured is what is in use."""
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 2**16)  # M_MMAP_THRESHOLD
    libc.malloc_trim(0)
