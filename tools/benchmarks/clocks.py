"""Clocks by which parts of a step are timed: the host's, or a GPU's own, for which nothing has to wait in between."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Moments are taken during a step; what lies between them is known once `wait` was called."""

    def now(self) -> Any: ...

    def wait(self) -> None:
        """Until all that was asked for is done."""
        ...

    def seconds(self, begin: Any, end: Any) -> float: ...


class HostClock:
    """Of a CPU, which is done with a thing when the next one begins."""

    def now(self) -> float:
        return time.perf_counter()

    def wait(self) -> None:
        pass

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class DeviceClock:
    """A CUDA device notes when it comes to a moment, while the host goes on."""

    def now(self) -> torch.cuda.Event:
        moment = torch.cuda.Event(enable_timing=True)
        moment.record()
        return moment

    def wait(self) -> None:
        torch.cuda.synchronize()

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(begin.elapsed_time(end)) / 1e3


def clock_of(device: torch.device) -> Clock:
    return DeviceClock() if device.type == "cuda" else HostClock()
