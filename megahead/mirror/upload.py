"""Copies finished checkpoints to the mirror in a thread, so that no step waits for the store."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from megahead.checkpoint import KeepRules, step_of
from megahead.errors import UserError
from megahead.mirror.far_run import FarRun
from megahead.mirror.ownership import TakenOverError, begin_session, refuse_another_session
from megahead.mirror.sending import send, settle
from megahead.run_folder import RunFolder

PAUSES = (0.0, 1.0, 10.0)
"""Seconds before each attempt to send a checkpoint."""

TELL_SECONDS = 10.0
"""Between two lines while the run waits for its last upload."""


@dataclass(frozen=True)
class News:
    """What became of a checkpoint."""

    facts: dict[str, Any]
    """For the log: its `step`; `seconds` and `bytes` if it arrived, else why it `failed`, or that it was `skipped`."""

    sentence: str | None = None
    """For the console, if something is wrong."""


_NOTHING = sys.maxsize
"""No step is above it."""


@dataclass(frozen=True)
class _Order:
    folder: Path
    parent_step: int


class Mirror:
    """Rank 0's copies of its run in a store. Its methods return at once.

    One checkpoint is on its way at a time; of those that are saved meanwhile only the newest is sent next. What goes
    wrong is tried again, then told; the next checkpoint is sent all the same, and the run does not depend on it.
    """

    def __init__(self, far: FarRun, folder: RunFolder, mark: str, keep: int, keep_rules: KeepRules) -> None:
        """`mark`: the session's, in `folder`; `keep`, `keep_rules`: which checkpoints stay in the mirror."""
        self._far, self._folder, self._mark = far, folder, mark
        self._keep, self._keep_rules = keep, keep_rules
        self.in_hand: set[int] = set()
        """Steps of checkpoints that must not be removed yet, because they are being read."""
        self._change = threading.Condition()
        self._waiting: _Order | None = None
        self._sending: _Order | None = None
        self._owed = _NOTHING
        self._files_wait = True
        self._busy = self._ours = self._begun = self._closed = False
        self._news: SimpleQueue[News] = SimpleQueue()
        self._taken: UserError | None = None
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where it is."""
        return self._far.url

    def offer(self, folder: Path, parent_step: int) -> None:
        """Sends a finished checkpoint, which continues the one of `parent_step`, when its turn comes."""
        with self._change:
            passed_over, self._waiting = self._waiting, _Order(folder, parent_step)
            if passed_over is not None:
                self._skip(passed_over)
            self._note_in_hand()
            self._change.notify_all()

    def offer_files(self) -> None:
        """Sends the run's small files once more, as they are now."""
        with self._change:
            self._files_wait = True
            self._change.notify_all()

    def close(self) -> None:
        """Ends the thread once nothing is left to be sent."""
        with self._change:
            self._closed = True
            self._change.notify_all()

    def check(self) -> None:
        """UserError if another session was seen to have begun with this mirror."""
        if self._taken is not None:
            raise self._taken

    def news(self) -> list[News]:
        """What happened since the last call."""
        return [self._news.get() for _ in range(self._news.qsize())]  # only this thread takes some

    def finishing(self, deadline: float = math.inf) -> Iterator[None]:
        """Ends when nothing is left to be sent, or all attempts have failed, or the monotonic clock is there; yields
        often."""
        told = time.monotonic()
        while self._at_work() and time.monotonic() < deadline:
            if time.monotonic() - told > TELL_SECONDS:
                told = time.monotonic()
                print(f"waiting until the last checkpoint is in {self.url}", flush=True)
            time.sleep(0.02)
            yield

    def _at_work(self) -> bool:
        with self._change:
            at_work = self._busy or self._waiting is not None or self._files_wait
        return at_work and self._thread.is_alive()

    def _note_in_hand(self) -> None:
        now = {step_of(order.folder) for order in (self._sending, self._waiting) if order is not None}
        self.in_hand |= now  # never without one of them: another thread looks
        self.in_hand &= now

    def _work(self) -> None:
        """The thread: a checkpoint, then the small files, whenever there are some."""
        while True:
            with self._change:
                self._change.wait_for(lambda: self._waiting is not None or self._files_wait or self._closed)
                if self._waiting is None and not self._files_wait:
                    return
                order = self._take()
            if order is None or self._send(order):
                self._send_files(order)
            with self._change:
                self._sending, self._busy = None, False
                self._note_in_hand()

    def _take(self) -> _Order | None:
        """The checkpoint to be sent; also removes from the mirror what those that were not sent would have."""
        order, self._waiting, self._busy = self._waiting, None, True
        if order is not None:
            order, self._owed = _Order(order.folder, min(order.parent_step, self._owed)), _NOTHING
        self._sending = order
        return order

    def _send(self, order: _Order) -> bool:
        """Whether it is there then; else that is told."""
        began, step, reason = time.monotonic(), step_of(order.folder), ""
        for pause in PAUSES:
            with self._change:
                if self._change.wait_for(lambda: self._waiting is not None, pause) and reason:
                    break  # a newer one takes its place
            try:
                self._begin()
                sent = send(self._far, order.folder, order.parent_step, self._refuse_another)
            except Exception as error:
                reason = self._reason(error)
            else:
                seconds = round(time.monotonic() - began, 3)
                self._news.put(News({"step": step, "seconds": seconds, "bytes": sent}))
                return True
            if self._taken is not None or _is_gone(order.folder):
                break
        self._fail(order, reason)
        return False

    def _reason(self, error: Exception) -> str:
        if isinstance(error, TakenOverError):
            self._taken = error
        return str(error) if isinstance(error, UserError) else repr(error)

    def _fail(self, order: _Order, reason: str) -> None:
        step = step_of(order.folder)
        with self._change:
            self._owed = min(self._owed, order.parent_step)
        if _is_gone(order.folder):
            return  # set aside when the run went back; the checkpoint that did so follows
        sentence = f"step {step:,} is not in the mirror, only in {order.folder}: {reason}"
        self._news.put(News({"step": step, "failed": reason}, sentence))

    def _skip(self, order: _Order) -> None:
        step = step_of(order.folder)
        self._owed = min(self._owed, order.parent_step)
        if any(other is not None and other.folder == order.folder for other in (self._sending, self._waiting)):
            return  # it is on its way, or comes next, all the same
        sentence = f"step {step:,} is not copied to the mirror, since an older one is still on its way to {self.url}"
        self._news.put(News({"step": step, "skipped": True}, sentence))

    def _send_files(self, sent: _Order | None) -> None:
        """The run's small files; before them, removes what a checkpoint that was `sent` makes superfluous."""
        with self._change:
            self._files_wait = False
        try:
            self._begin()
            if sent is not None:
                settle(self._far, sent.folder, self._keep, self._keep_rules)
            self._put(self._folder.metrics, self._folder.ending)
        except Exception as error:
            reason = self._reason(error)
            self._news.put(News({"failed": reason}, f"the run's log is not in the mirror: {reason}"))

    def _begin(self) -> None:
        """Also whenever something is sent later: whether another session has begun since."""
        if not self._ours:
            begin_session(self._far.store, self._folder, self._mark)
            self._ours = True  # once: it would be another session's that it takes
        self._refuse_another()
        if not self._begun:
            self._far.store.remove(self._folder.ending.name)
            self._put(self._folder.config, self._folder.tokenizer)
            self._begun = True

    def _refuse_another(self) -> None:
        refuse_another_session(self._far.store, self._mark)

    def _put(self, *paths: Path) -> None:
        """Sends small files, as far as they are there."""
        for path in paths:
            with suppress(FileNotFoundError):
                content = path.read_bytes()
                self._far.store.write(path.name, content)


def _is_gone(folder: Path) -> bool:
    """Whether it has another name now; False where the disk cannot tell."""
    with suppress(OSError):
        return not folder.is_dir()
    return False
