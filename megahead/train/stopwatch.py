"""Measures how long training took, without pauses."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Starts when it is created, at `seconds`."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._start = time.monotonic() - seconds

    def seconds(self) -> float:
        """Seconds so far."""
        return time.monotonic() - self._start

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent inside is not counted."""
        before = time.monotonic()
        yield
        self._start += time.monotonic() - before
