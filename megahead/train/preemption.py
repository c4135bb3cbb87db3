"""Being asked to stop: noticed at once, acted upon when all ranks are ready."""

from __future__ import annotations

import os
import signal
import threading
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
    """Afterwards signals do what they did before."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None and _receives_signals():  # None: it was set by no Python code
                signal.signal(number, handler)


def _receives_signals() -> bool:
    """Python gives signals to its main thread only."""
    return threading.current_thread() is threading.main_thread()


class StopRequest:
    """Remembers SIGTERM and SIGUSR1 (preemption, Slurm's `--signal`) until someone asks; more change nothing.

    So it does a first Ctrl-C, and says so where it `prints`; a second one ends the process at once. In another thread
    than the main one it hears nothing.
    """

    def __init__(self, prints: bool = True) -> None:
        self.signal: str | None = None
        self._prints = prints
        for number in SIGNALS if _receives_signals() else ():
            signal.signal(number, self._note)

    def agreed(self, world_group: Group) -> bool:
        """Whether any rank was asked to stop, the same answer on all. Collective."""
        return bool(world_group.all_reduce_max_(torch.tensor(int(self.signal is not None))))

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if self._prints:
                os.write(2, b"\nsaving after this step, then stopping; Ctrl-C again ends at once\n")
