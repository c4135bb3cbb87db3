"""Copies finished checkpoints to the mirror in a thread, so that no step waits for the store."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

from megahead.checkpoint import KeepRules
from megahead.errors import UserError
from megahead.mirror.abandonment import Abandonment
from megahead.mirror.far_run import FarRun
from megahead.mirror.news import News, arrived, failed, log_failed, skipped
from megahead.mirror.outbox import NO_STEP, Outbox, Parcel
from megahead.mirror.ownership import Claim, TakenOverError
from megahead.mirror.sending import send, settle
from megahead.run_folder import RunFolder

PAUSES = (0.0, 1.0, 10.0)
"""Seconds before each attempt."""

TELL_SECONDS = 10.0
"""Between two lines while the run waits for its last upload."""


class Mirror:
    """Rank 0's copies of its run in a store. Its methods return at once.

    One checkpoint is on its way at a time; of those that are saved meanwhile only the newest is sent next. What goes
    wrong is tried again, then told; the next checkpoint is sent all the same, and the run does not depend on it.
    """

    def __init__(
        self, far: FarRun, folder: RunFolder, claim: Claim, tip: int, keep: int, keep_rules: KeepRules
    ) -> None:
        """`claim`: the session's; `tip`: the step of the checkpoint in `folder` that it begins with, -1 if there is
        none; `keep`, `keep_rules`: which checkpoints stay in the mirror."""
        self._far, self._folder = far, folder
        self._keep, self._keep_rules = keep, keep_rules
        self._claim, self._begun = claim, False
        self._abandonment = Abandonment(far, folder, tip)
        self._taken: UserError | None = None
        self._outbox, self._news = Outbox(), SimpleQueue[News]()
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where it is."""
        return self._far.url

    @property
    def in_hand(self) -> set[int]:
        """Steps of checkpoints that must not be removed yet, because they are being read."""
        return self._outbox.in_hand

    def offer(self, folder: Path, parent_step: int) -> None:
        """Sends a finished checkpoint, which continues the one of `parent_step`, when its turn comes."""
        self._abandonment.saved()
        self._put_in(Parcel(folder, parent_step))

    def offer_again(self, folder: Path) -> None:
        """Sends the checkpoint that a session begins with, as far as it is not there. Nothing goes for it: the run may
        yet go on from newer ones."""
        self._put_in(Parcel(folder, NO_STEP))

    def _put_in(self, parcel: Parcel) -> None:
        passed_over = self._outbox.put(parcel)
        if passed_over is not None:
            self._news.put(skipped(passed_over.step, self.url))

    def offer_files(self) -> None:
        """Sends the run's small files once more, as they are now."""
        self._outbox.put_files()

    def close(self) -> None:
        """Ends the thread once nothing is left to be sent."""
        self._outbox.close()

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
        while self._thread.is_alive() and not self._outbox.is_empty() and time.monotonic() < deadline:
            if time.monotonic() - told > TELL_SECONDS:
                told = time.monotonic()
                print(f"waiting until the last checkpoint is in {self.url}", flush=True)
            time.sleep(0.02)
            yield

    def _work(self) -> None:
        """The thread: a checkpoint, then the small files, whenever there are some."""
        for parcel in self._outbox:
            if parcel is None or self._send(parcel):
                self._send_files(parcel)

    def _send(self, parcel: Parcel) -> bool:
        """Whether it is there then; else that is told."""
        began = time.monotonic()

        def attempt() -> None:
            self._begin()
            abandoned = self._abandonment.written_down()
            sent = send(self._far, parcel.folder, parcel.parent_step, self._claim.refuse_another)
            self._abandonment.is_gone(abandoned, and_newer=parcel.turns_away)
            self._news.put(arrived(parcel.step, time.monotonic() - began, sent))

        reason = self._failure_of(attempt, lambda: _is_gone(parcel.folder))
        if reason is None:
            return True
        self._outbox.owe(parcel)
        if not _is_gone(parcel.folder):  # else set aside when the run went back; the checkpoint that did so follows
            self._news.put(failed(parcel.step, parcel.folder, reason))
        return False

    def _send_files(self, sent: Parcel | None) -> None:
        """The run's small files; before them, removes what a checkpoint that was `sent` makes superfluous."""
        self._outbox.files_taken()

        def attempt() -> None:
            self._begin()
            if sent is not None:
                settle(self._far, sent.folder, self._keep, self._keep_rules)
            self._put(self._folder.metrics, self._folder.ending)

        reason = self._failure_of(attempt)
        if reason is not None:
            self._news.put(log_failed(reason))

    def _failure_of(self, attempt: Callable[[], None], is_in_vain: Callable[[], bool] = lambda: False) -> str | None:
        """Why all attempts failed; None once one did not. A newer checkpoint ends them: it takes this one's place."""
        reason = None
        for pause in PAUSES:
            if self._outbox.pause(pause) and reason is not None:
                break
            try:
                attempt()
            except Exception as error:
                reason = self._reason(error)
            else:
                return None
            if self._taken is not None or is_in_vain():
                break
        return reason

    def _begin(self) -> None:
        """Also whenever something is sent later: another session may have begun since, or somebody emptied it."""
        self.check()
        if not self._abandonment.is_known:
            self._claim.refuse_another()
            self._abandonment.look()
        if self._claim.hold():
            self._begun = False
        if not self._begun:
            self._far.store.remove(self._folder.ending.name)
            tokenizers = self._folder.tokenizer_json, self._folder.tokenizer_model
            self._put(self._folder.config, *tokenizers, self._folder.published)
            self._begun = True

    def _reason(self, error: Exception) -> str:
        if isinstance(error, TakenOverError):
            self._taken = error
        return str(error) if isinstance(error, UserError) else repr(error)

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
