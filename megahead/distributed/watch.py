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

    def __init__(self, faults: Mapping[int, str]) -> None:
        """`faults`: from rank to what became of it."""
        super().__init__(f"all ranks must take part in the run, but {_told(faults)}; start again to resume.")


class Watch:
    """Rank `rank`'s end of its line to rank 0; `end_process` is called from the thread, with the reason."""

    def __init__(self, line: Line, rank: int, limit_seconds: float, end_process: Callable[[str], None]) -> None:
        self._line, self._rank, self._limit, self._end_process = line, rank, limit_seconds, end_process
        self._told: SimpleQueue[str | dict[int, str]] = SimpleQueue()
        self._ends = threading.Event()
        threading.Thread(target=self._listen, name="watch", daemon=True).start()

    def meet(self) -> None:
        """Until all ranks are here; LostRankError names who does not come in time."""
        self._expect(None)  # rank 0 knows the limit, and the thread whether there is a rank 0

    def leave(self) -> None:
        """Until no rank needs another any more; LostRankError names who does not come in time."""
        self._line.say("left")
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
            faults = self._ask("waited") if waited else self._ask("ended", f"{type(error).__name__}: {error}")
            if not waited or not faults:
                raise
            raise LostRankError(faults) from error

    def _expect(self, seconds: float | None) -> None:
        """Waits until rank 0 says that all are as far; it speaks of nothing else but of lost ranks."""
        try:
            told = self._told.get(timeout=seconds)
        except Empty:
            told = self._ask("waited")
        if isinstance(told, dict):
            self._ends.set()
            raise LostRankError(told)

    def _ask(self, *words: str) -> dict[int, str]:
        """Who is lost, in return for why this rank ends now."""
        self._ends.set()
        self._line.say(*words)
        try:
            told = self._told.get(timeout=2 * GRACE_SECONDS)
        except Empty:
            told = {0: f"died or hangs (no answer within {2 * GRACE_SECONDS:g} s)"}
        return told if isinstance(told, dict) else {}

    def _listen(self) -> None:
        """The thread: until all have left, or some are lost."""
        for word, *more in self._messages():
            if word == "lost":
                return self._end(dict(more[0]))
            self._told.put(word)
            if word == "left":
                return None

    def _messages(self) -> Iterator[list[Any]]:
        """What rank 0 says, at last perhaps by its silence."""
        pulse, selector = Pulse(self._limit), DefaultSelector()
        selector.register(self._line, EVENT_READ)
        while self._line.unheard <= pulse.beats + 1:
            try:
                messages = self._line.hear() if selector.select(pulse.pause()) else []
            except EOFError:
                yield ["lost", [[0, "died"]]]
                return
            yield from (message for message in messages if message != ["beat"])
            if pulse.due():
                self._line.unheard += 1
                self._line.say("beat")
        yield ["lost", [[0, f"died or hangs (silent for {self._limit:g} s)"]]]

    def _end(self, faults: dict[int, str]) -> None:
        """Gives the main thread a moment to find out by itself, then ends the process; one that is at fault itself
        shows where it stands."""
        self._told.put(faults)
        if not self._ends.wait(GRACE_SECONDS):
            if self._rank in faults:
                traceback.print_stack(sys._current_frames()[threading.main_thread().ident or 0])
            self._end_process(str(LostRankError(faults)))


def _told(faults: Mapping[int, str]) -> str:
    """What became of whom, like fates together."""
    fates: dict[str, list[int]] = {}
    for rank, fate in faults.items():
        fates.setdefault(fate, []).append(rank)
    who = [f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} {fate}" for fate, ranks in fates.items()]
    return "; ".join(who) or "each waits for the others"
