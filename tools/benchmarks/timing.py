"""What all benchmarks measure with: turns, clocks, memory, and a device's rate."""

from __future__ import annotations

import ctypes
import multiprocessing
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")
Cost = tuple[float, float]  # seconds, and MiB above what was there before


def interleaved(variants: Iterable[Callable[[int], Result]], rounds: int, warm_up: int = 1) -> list[list[Result]]:
    """What each variant returns in each counted round: A B A B ..., so that a noisy machine hits all alike."""
    timed = list(variants)
    return [[take(number) for take in timed] for number in range(warm_up + rounds)][warm_up:]


class HostClock:
    """Of a CPU, which is done with a thing when the next one begins. Moments are taken during a step; what lies between
    them is known once `wait` was called."""

    def now(self) -> Any:
        return time.perf_counter()

    def wait(self) -> None:
        """Until all that was launched is done."""

    def seconds(self, begin: Any, end: Any) -> float:
        return float(end - begin)


class DeviceClock(HostClock):
    """A CUDA device notes when it comes to a moment, while the host goes on."""

    def now(self) -> torch.cuda.Event:
        moment = torch.cuda.Event(enable_timing=True)
        moment.record()
        return moment

    def wait(self) -> None:
        torch.cuda.synchronize()

    def seconds(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1e3


def clock_of(device: torch.device) -> HostClock:
    return DeviceClock() if device.type == "cuda" else HostClock()


def matrix_rate(device: torch.device, precision: str, size: int | None = None) -> float:
    """Operations a second of a square product, the best of five: what the device can reach."""
    size = size or (8192 if device.type == "cuda" else 2048)
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    clock, best = clock_of(device), float("inf")
    for _ in range(6):
        begin, _product, end = clock.now(), a @ a, clock.now()
        clock.wait()
        best = min(best, clock.seconds(begin, end))
    return 2 * size**3 / best


def describe(device: torch.device) -> str:
    """The device's name, or how many threads compute."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{threads} CPU thread{'s' if threads > 1 else ''}"


def in_child(work: Callable[[], Result]) -> Result:
    """`work()` in a forked process: nothing that was freed before hides what it takes. MemoryError when it is killed.

    Call it before this process has computed with torch: threads do not survive a fork.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=lambda: theirs.send(work()))
    child.start()
    theirs.close()  # so that the child's end ends what waits for it
    try:
        result: Result = ours.recv()
        return result
    except EOFError:
        raise MemoryError("a measurement was killed, most likely for its memory; use smaller sizes") from None
    finally:
        child.join()


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
