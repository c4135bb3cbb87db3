"""Requests to stop: recorded when a signal arrives, obeyed by all ranks between two steps."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Literal

import torch

from megahead.distributed import Group

Ending = Literal["finished", "out of time", "stopped"]
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


@contextmanager
def signals_put_back() -> Iterator[None]:
    """Restores the signal handlers when the block ends."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None and _receives_signals():  # None: it was set by no Python code
                signal.signal(number, handler)


def _receives_signals() -> bool:
    """Whether this is the main thread, the only one to which Python gives signals."""
    return threading.current_thread() is threading.main_thread()


class StopRequest:
    """Records SIGTERM and SIGUSR1 (preemption, Slurm's `--signal`); further ones change nothing.

    The first Ctrl-C is recorded too (with a message if `prints`), a second one ends the process at once. Made outside
    of the main thread it sees no signals.
    """

    def __init__(self, prints: bool = True) -> None:
        self.signal: str | None = None
        self.came: float | None = None
        """When the first did, on the monotonic clock."""
        self._prints = prints
        for number in SIGNALS if _receives_signals() else ():
            signal.signal(number, self._note)

    def agreed(self, world_group: Group) -> bool:
        """Whether any rank was asked to stop, the same answer on all. Collective."""
        return bool(world_group.all_reduce_max_(torch.tensor(int(self.signal is not None))))

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = self.came or time.monotonic()
        self.signal = signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if self._prints:
                os.write(2, b"\nsaving after this step, then stopping; Ctrl-C again ends at once\n")
