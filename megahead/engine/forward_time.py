"""How long forward passes take on this rank: its own computing, before it waits for others' gradients."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class ForwardTime:
    """Sums up seconds; on a GPU by events, for which the host never waits."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def measured(self) -> Iterator[None]:
        """A forward pass, in the block."""
        if not self._on_gpu:
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began
            return
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        yield
        last.record()
        self._events.append((first, last))

    def take(self) -> float:
        """Seconds since it was last asked; on a GPU, the host must have waited for the last forward pass by then (for
        its loss, say), or this raises a RuntimeError."""
        for first, last in self._events:
            self._seconds += first.elapsed_time(last) / 1e3
        taken, self._seconds = self._seconds, 0.0
        self._events.clear()
        return taken
