"""Who is missing: when a rank dies or hangs, the others learn its name instead of an address, and end.

Waiting for a rank that died may end at once (gloo), after some time limit as a RuntimeError that names nobody, or
never: a store whose process is stopped answers no question, NCCL's kernels wait for whom they know. So every rank keeps
a line to rank 0, from meeting until leaving, and a thread that listens to it. When a rank is lost, whoever gets an
error of waiting is told who it was, and whoever still waits a moment later is ended.
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
        super().__init__(f"all ranks must take part in the run, but {_describe_lost(lost)}; start again to resume.")


class Watch:
    """Rank `rank`'s end of its line to rank 0; `end_process` is called from the thread, with the reason."""

    def __init__(self, line: Line, rank: int, limit_seconds: float, end_process: Callable[[str], None]) -> None:
        self._line, self._rank, self._limit, self._end_process = line, rank, limit_seconds, end_process
        self._received: SimpleQueue[str | dict[int, str]] = SimpleQueue()
        self._ends = threading.Event()
        threading.Thread(target=self._listen, name="watch", daemon=True).start()

    def meet(self) -> None:
        """Until all ranks are here; LostRankError names who does not come in time."""
        self._expect(None)  # rank 0 knows the limit, and the thread whether there is a rank 0

    def leave(self) -> None:
        """Until no rank needs another any more; LostRankError names who does not come in time."""
        self._line.send("left")
        self._expect(self._limit)

    @contextmanager
    def naming_lost_ranks(self) -> Iterator[None]:
        """Inside, an error of waiting for others becomes a LostRankError that names them; other errors are told to
        them. A wait that does not end although a rank is lost ends the process."""
        try:
            yield
        except LostRankError:
            raise
        except Exception as error:
            waited = is_waiting_error(error)
            lost = self._ask("waited") if waited else self._ask("ended", f"{type(error).__name__}: {error}")
            if not waited or not lost:
                raise
            raise LostRankError(lost) from error

    def _expect(self, seconds: float | None) -> None:
        """Waits until rank 0 says that all are as far; it speaks of nothing else but of lost ranks."""
        try:
            received = self._received.get(timeout=seconds)
        except Empty:
            received = self._ask("waited")
        if isinstance(received, dict):
            self._ends.set()
            raise LostRankError(received)

    def _ask(self, *words: str) -> dict[int, str]:
        """Who is lost, in return for why this rank ends now."""
        self._ends.set()
        self._line.send(*words)
        try:
            received = self._received.get(timeout=2 * GRACE_SECONDS)
        except Empty:
            received = {0: f"died or hangs (no answer within {2 * GRACE_SECONDS:g} s)"}
        return received if isinstance(received, dict) else {}

    def _listen(self) -> None:
        """The thread: until all have left, or some are lost."""
        for word, *more in self._messages():
            if word == "lost":
                return self._end(dict(more[0]))
            self._received.put(word)
            if word == "left":
                return None

    def _messages(self) -> Iterator[list[Any]]:
        """What rank 0 says, at last perhaps by its silence."""
        pulse, selector = Pulse(self._limit), DefaultSelector()
        selector.register(self._line, EVENT_READ)
        while self._line.silent_beats <= pulse.beats + 1:
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
        """Gives the main thread a moment to find out by itself, then ends the process; one that is at fault itself
        shows where it stands."""
        self._received.put(lost)
        if not self._ends.wait(GRACE_SECONDS):
            if self._rank in lost:
                traceback.print_stack(sys._current_frames()[threading.main_thread().ident or 0])
            self._end_process(str(LostRankError(lost)))


def _describe_lost(lost: Mapping[int, str]) -> str:
    """What became of whom, like fates together."""
    fates: dict[str, list[int]] = {}
    for rank, fate in lost.items():
        fates.setdefault(fate, []).append(rank)
    who = [f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} {fate}" for fate, ranks in fates.items()]
    return "; ".join(who) or "each waits for the others"
