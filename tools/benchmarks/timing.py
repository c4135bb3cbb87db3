"""Measurements shared by the benchmarks: interleaved rounds, clocks, peak memory, and a device's matmul rate."""

from __future__ import annotations

import ctypes
import multiprocessing
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from megahead.wording import pluralize

Result = TypeVar("Result")
Cost = tuple[float, float]  # seconds, and MiB of peak memory above that at the start


def run_interleaved(variants: Sequence[Callable[[], Result]], rounds: int, warm_up: int = 1) -> list[list[Result]]:
    """Runs variants in turn (A B A B ...), so that noise affects all alike; returns their results by counted round."""
    return [[variant() for variant in variants] for _ in range(warm_up + rounds)][warm_up:]


class Clock:
    """Timestamps of a device: a GPU's are CUDA events, which do not block the host, a CPU's those of the host. Call
    `wait` before `seconds`."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"

    def now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        """Waits for all operations launched so far."""
        if self._on_gpu:
            torch.cuda.synchronize()

    def seconds(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1e3 if self._on_gpu else float(end - start)


def measure_matmul_rate(device: torch.device, precision: str, size: int | None = None) -> float:
    """FLOP/s of a square matrix product, the best of six."""
    size = size or (8192 if device.type == "cuda" else 2048)
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    clock, best_seconds = Clock(device), float("inf")
    for _ in range(6):
        start, _product, end = clock.now(), a @ a, clock.now()
        clock.wait()
        best_seconds = min(best_seconds, clock.seconds(start, end))
    return 2 * size**3 / best_seconds


def describe_device(device: torch.device) -> str:
    """The GPU's name, or the number of CPU threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return pluralize(torch.get_num_threads(), "CPU thread")


def run_in_child(work: Callable[[], Result]) -> Result:
    """Returns `work()`, run in a forked process, whose memory use starts afresh. MemoryError when it is killed,
    RuntimeError when it fails, after its traceback on stderr.

    Call it before this process has computed with torch: threads do not survive a fork.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=lambda: sender.send(work()))
    child.start()
    sender.close()  # so that recv fails when the child dies
    try:
        result: Result = receiver.recv()
    except EOFError:
        child.join()
        if child.exitcode == 1:
            raise RuntimeError("a measurement failed with the error above") from None
        raise MemoryError("a measurement was killed, most likely for its memory; use smaller sizes") from None
    child.join()
    return result


def measure_cost(work: Callable[[], object]) -> Cost:
    """Time of `work()` and its peak memory above that of this process, which should be a fresh child."""
    ctypes.CDLL(None).malloc_trim(0)  # freed memory that was not returned would hide new allocations
    before_kib = _process_status_kib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    start = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - start
    del result
    return seconds, (_process_status_kib("VmHWM") - before_kib) / 1024


def _process_status_kib(name: str) -> int:
    """A value of /proc/self/status, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))
