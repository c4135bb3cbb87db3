"""Time and peak memory of work on a CPU, in a forked process: nothing that was freed before hides what it takes."""

from __future__ import annotations

import ctypes
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")
Cost = tuple[float, float]
"""Seconds, and MiB above what was there before."""


def in_child(work: Callable[[], Result]) -> Result:
    """`work()` in a forked process. MemoryError when it is killed.

    Call it before this process has computed with torch: threads do not survive a fork.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        with os.fdopen(writer, "wb") as pipe:
            pickle.dump(work(), pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        content = pipe.read()
    os.waitpid(child, 0)
    if not content:
        raise MemoryError("a measurement was killed, most likely for its memory; use smaller sizes")
    result: Result = pickle.loads(content)
    return result


def cost(work: Callable[[], object]) -> Cost:
    """What `work()` takes beside what this process, which had better be a fresh child, holds already."""
    ctypes.CDLL(None).malloc_trim(0)  # memory that was freed before would hide what is taken now
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    start = time.perf_counter()
    kept = work()
    seconds = time.perf_counter() - start
    del kept
    return seconds, (_status("VmHWM") - before) / 1024


def _status(name: str) -> int:
    """A line of /proc/self/status, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))
