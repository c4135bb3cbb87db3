"""Lost ranks: when a rank dies or hangs, the others report which one it was, and end.

Without this, waiting for a rank that died may fail at once (gloo), fail after a time limit with a RuntimeError that
names no rank, or never end: a store whose process is suspended does not answer, and NCCL's kernels keep waiting. So
every rank has a connection (a `Line`) to rank 0 from `meet` to `leave`, and a thread that reads it. When a rank is
lost, the others learn its number; one that still waits `GRACE_SECONDS` later is ended.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from selectors import EVENT_READ, DefaultSelector
from typing import Any

from megahead.distributed.lines import Line, Pulse
from megahead.distributed.switchboard import GRACE_SECONDS
from megahead.distributed.waiting import is_waiting_error
from megahead.errors import UserError


class LostRankError(UserError):
    """Other ranks died, hang, or failed."""

    def __init__(self, lost: Mapping[int, str]) -> None:
        """`lost`: from rank to what became of it."""
        self.lost = lost
        super().__init__(f"all ranks must take part in the run, but {_describe_lost(lost)}; start again to resume.")


class Watch:
    """Rank `rank`'s end of its line to rank 0. The thread calls `end_process` with the reason, if it must."""

    def __init__(self, line: Line, rank: int, limit_seconds: float, end_process: Callable[[str], None]) -> None:
        self._line, self._rank, self._limit, self._end_process = line, rank, limit_seconds, end_process
        self._received: SimpleQueue[str | dict[int, str]] = SimpleQueue()
        self._ends = threading.Event()
        threading.Thread(target=self._listen, name="watch", daemon=True).start()

    def wait_for_all(self) -> None:
        """Waits until all ranks are connected; LostRankError names those that are too late."""
        self._expect(None)  # rank 0 enforces the limit, and the thread notices if rank 0 is lost

    def leave(self) -> None:
        """Waits until all ranks are finished; LostRankError names those that are too late."""
        self._line.send("left")
        self._expect(self._limit)

    def look_on(self) -> None:
        """For a rank that only looks on: waits until the others have left; LostRankError if they end otherwise."""
        while self._expect(None) != "left":
            pass

    @contextmanager
    def naming_lost_ranks(self) -> Iterator[None]:
        """Inside, a failed wait for other ranks becomes a LostRankError that names them; any other error is reported to
        them. If a rank is lost and a wait does not end, the process is ended."""
        try:
            yield
        except LostRankError:
            raise
        except Exception as error:
            waited = is_waiting_error(error)
            lost = self._ask("gave_up") if waited else self._ask("ended", f"{type(error).__name__}: {error}")
            if not waited or not lost:
                raise
            raise LostRankError(lost) from error

    def _expect(self, seconds: float | None) -> str:
        """Waits for rank 0's message that all ranks got here; LostRankError if it reports lost ranks instead."""
        try:
            received = self._received.get(timeout=seconds)
        except Empty:
            received = self._ask("gave_up")
        if isinstance(received, dict):
            self._ends.set()
            raise LostRankError(received)
        return received

    def _ask(self, *words: str) -> dict[int, str]:
        """Reports why this rank ends; returns the lost ranks, from rank to what became of it."""
        self._ends.set()
        self._line.send(*words)
        try:
            received = self._received.get(timeout=2 * GRACE_SECONDS)
        except Empty:
            received = {0: f"died or hangs (no answer within {2 * GRACE_SECONDS:g} s)"}
        return received if isinstance(received, dict) else {}

    def _listen(self) -> None:
        """The thread: reads messages until all ranks have left, or some are lost."""
        for word, *more in self._messages():
            if word == "lost":
                return self._end(dict(more[0]))
            self._received.put(word)
            if word == "left":
                return None

    def _messages(self) -> Iterator[list[Any]]:
        """Rank 0's messages; the last may be made here, when rank 0 itself died or was silent for too long."""
        pulse, selector = Pulse(self._limit), DefaultSelector()
        selector.register(self._line, EVENT_READ)
        while self._line.silent_beats <= pulse.limit_beats + 1:
            try:
                messages = self._line.receive() if selector.select(pulse.pause()) else []
            except EOFError:
                yield ["lost", [[0, "died"]]]
                return
            yield from (message for message in messages if message != ["beat"])
            if pulse.due():
                self._line.silent_beats += 1
                self._line.send("beat")
        yield ["lost", [[0, f"died or hangs (silent for {self._limit:g} s)"]]]

    def _end(self, lost: dict[int, str]) -> None:
        """Ends the process unless the main thread does so within `GRACE_SECONDS`. If this rank itself is the lost one,
        prints the stack of its main thread first."""
        self._received.put(lost)
        if not self._ends.wait(GRACE_SECONDS):
            if self._rank in lost:
                traceback.print_stack(sys._current_frames()[threading.main_thread().ident or 0])
            self._end_process(str(LostRankError(lost)))


def _describe_lost(lost: Mapping[int, str]) -> str:
    """A sentence such as: rank 1 died; ranks 2, 3 did not come within 60 s."""
    fates: dict[str, list[int]] = {}
    for rank, fate in lost.items():
        fates.setdefault(fate, []).append(rank)
    who = [f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} {fate}" for fate, ranks in fates.items()]
    return "; ".join(who) or "each waits for the others"
