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
from megahead.mirror.sending import send
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
        self._owed = _NOTHING
        self._files_wait = True
        self._busy = self._begun = self._closed = False
        self._news: SimpleQueue[News] = SimpleQueue()
        self._taken: UserError | None = None
        threading.Thread(target=self._work, name="mirror", daemon=True).start()

    @property
    def url(self) -> str:
        """Where it is."""
        return self._far.url

    def offer(self, folder: Path, parent_step: int) -> None:
        """Sends a finished checkpoint, which continues the one of `parent_step`, when its turn comes."""
        with self._change:
            if self._waiting is not None:
                self._skip(self._waiting)
            self._waiting = _Order(folder, parent_step)
            self.in_hand.add(step_of(folder))
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

    def finishing(self, seconds: float = math.inf) -> Iterator[None]:
        """Ends when nothing is left to be sent, or all attempts have failed, or after so many seconds; yields often."""
        told, deadline = time.monotonic(), time.monotonic() + seconds
        while self._at_work() and time.monotonic() < deadline:
            if time.monotonic() - told > TELL_SECONDS:
                told = time.monotonic()
                print(f"waiting until the last checkpoint is in {self.url}", flush=True)
            time.sleep(0.02)
            yield

    def _at_work(self) -> bool:
        with self._change:
            return self._busy or self._waiting is not None or self._files_wait

    def _work(self) -> None:
        """The thread: a checkpoint, then the small files, whenever there are some."""
        while True:
            with self._change:
                self._change.wait_for(lambda: self._waiting is not None or self._files_wait or self._closed)
                if self._waiting is None and not self._files_wait:
                    return
                order = self._take()
            if order is not None:
                self._send(order)
            else:
                self._send_files()
            with self._change:
                if order is not None and (self._waiting is None or self._waiting.folder != order.folder):
                    self.in_hand.discard(step_of(order.folder))
                self._busy = False

    def _take(self) -> _Order | None:
        """The checkpoint to be sent; also removes from the mirror what those that were not sent would have."""
        order, self._waiting = self._waiting, None
        self._files_wait, self._busy = False, True
        if order is not None:
            order, self._owed = _Order(order.folder, min(order.parent_step, self._owed)), _NOTHING
        return order

    def _send(self, order: _Order) -> None:
        began, step, reason = time.monotonic(), step_of(order.folder), ""
        for pause in PAUSES:
            with self._change:
                if self._change.wait_for(lambda: self._waiting is not None, pause) and reason:
                    break  # a newer one takes its place
            try:
                self._begin()
                refuse_another_session(self._far.store, self._mark)
                sent = send(self._far, order.folder, order.parent_step, self._keep, self._keep_rules)
                self._put(self._folder.metrics, self._folder.ending)
            except Exception as error:
                reason = self._reason(error)
            else:
                seconds = round(time.monotonic() - began, 3)
                return self._news.put(News({"step": step, "seconds": seconds, "bytes": sent}))
            if self._taken is not None or not order.folder.is_dir():
                break
        self._fail(order, reason)

    def _reason(self, error: Exception) -> str:
        if isinstance(error, TakenOverError):
            self._taken = error
        return str(error) if isinstance(error, UserError) else repr(error)

    def _fail(self, order: _Order, reason: str) -> None:
        step = step_of(order.folder)
        with self._change:
            self._owed = min(self._owed, order.parent_step)
        if not order.folder.is_dir():
            return  # set aside when the run went back; the checkpoint that did so follows
        sentence = f"step {step:,} is not in the mirror, only in {order.folder}: {reason}"
        self._news.put(News({"step": step, "failed": reason}, sentence))

    def _skip(self, order: _Order) -> None:
        step = step_of(order.folder)
        self.in_hand.discard(step)
        self._owed = min(self._owed, order.parent_step)
        sentence = f"step {step:,} is not copied to the mirror, since an older one is still on its way to {self.url}"
        self._news.put(News({"step": step, "skipped": True}, sentence))

    def _send_files(self) -> None:
        try:
            self._begin()
            refuse_another_session(self._far.store, self._mark)
            self._put(self._folder.metrics, self._folder.ending)
        except Exception as error:
            reason = self._reason(error)
            self._news.put(News({"failed": reason}, f"the run's log is not in the mirror: {reason}"))

    def _begin(self) -> None:
        if not self._begun:
            begin_session(self._far.store, self._folder, self._mark)
            self._far.store.remove(self._folder.ending.name)
            self._put(self._folder.config, self._folder.tokenizer)
            self._begun = True

    def _put(self, *paths: Path) -> None:
        """Sends small files, as far as they are there."""
        for path in paths:
            with suppress(FileNotFoundError):
                content = path.read_bytes()
                self._far.store.write(path.name, content)
