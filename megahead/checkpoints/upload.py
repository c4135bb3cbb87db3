"""Uploads a run's checkpoints to a remote store in a thread, so that no step waits for the store."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from megahead.checkpoints.format import Manifest
from megahead.checkpoints.remote import LeaseLostError, RemoteLease, RemoteStorage
from megahead.checkpoints.store import Ancestry, Event, KeepRules, Latest, orphans, retain, step_of
from megahead.errors import UserError
from megahead.run_folder import RunFolder

# Sends a checkpoint: files, its manifest, `latest`. What need not be kept there goes afterwards.


def upload_checkpoint(remote: RemoteStorage, folder: Path, refuse: Callable[[], None], *, is_new: bool) -> int:
    """Puts a checkpoint into the store (see `Remote.put`), as the newest one if the session has saved it (`is_new`), or
    if it continues or orphans what is the newest there. Returns the bytes sent."""
    sent = remote.put(folder, refuse)
    latest, manifest = remote.latest.name, Manifest.read(folder)
    known = Ancestry.of(folder.name, manifest)
    if is_new or latest is None or known.supersedes(latest) or latest not in remote.names():
        remote.write_latest(Latest(folder.name, manifest.parents))
    return sent


def remove_superseded(remote: RemoteStorage, name: str, rules: KeepRules) -> None:
    """After `send`: what killed uploads have left goes; if the checkpoint is the newest, so does what the rules do not
    keep, and what is not of its history."""
    remote.remove_partial(but=name)
    if remote.latest.name == name:
        for orphan in orphans(remote):
            remote.remove(orphan)
        retain(remote, rules)


# The thread that sends: one checkpoint on its way, the newest of the others waiting, and the run's small files.


RETRY_DELAYS = (0.0, 1.0, 10.0)
"""Seconds before each attempt."""

PROGRESS_SECONDS = 10.0
"""Between two lines while the run waits for its last upload."""


@dataclass(frozen=True)
class Upload:
    """A checkpoint to be sent."""

    folder: Path

    is_new: bool
    """Whether the session has saved it; else it began with it, and may yet go on from what is newer there."""


class Uploader:
    """Rank 0's uploads of its run to a store. Its methods return at once.

    One checkpoint is on its way at a time; of those that are saved meanwhile only the newest is sent next. What goes
    wrong is tried again, then reported; the next checkpoint is sent all the same, and the run does not depend on it.
    """

    def __init__(self, remote: RemoteStorage, folder: RunFolder, lease: RemoteLease, rules: KeepRules) -> None:
        """`lease`: the session's; `rules`: which checkpoints stay in the store."""
        self._remote, self._folder, self._lease, self._rules = remote, folder, lease, rules
        self._change = threading.Condition()
        self._waiting: Upload | None = None
        self._on_its_way: Upload | None = None
        self._files = True
        self._busy = self._closed = self._begun = False
        self._taken: LeaseLostError | None = None
        self._events = SimpleQueue[Event]()
        self._thread = threading.Thread(target=self._work, name="uploads", daemon=True)
        self._thread.start()

    def enqueue(self, folder: Path, *, is_new: bool = True) -> None:
        """Sends a finished checkpoint when its turn comes, as far as it is not there; `is_new`: the session has saved
        it, so that from then on it is the newest one there."""
        with self._change:
            before, self._waiting = self._waiting, Upload(folder, is_new)
            self._change.notify_all()
            if before is not None and before.is_new and before.folder.name not in self.in_use:
                step, reason = step_of(before.folder), "since an older one is still on its way to"
                sentence = f"step {step:,} is not copied to the remote store, {reason} {self._remote.url}"
                self._events.put(Event({"step": step, "skipped": True}, sentence))

    @property
    def in_use(self) -> set[str]:
        """Names of checkpoints that must not be removed from the disk yet: they wait, or are being read."""
        with self._change:
            return {each.folder.name for each in (self._on_its_way, self._waiting) if each is not None}

    def enqueue_files(self) -> None:
        """Sends the run's small files once more, as they are now."""
        with self._change:
            self._files = True
            self._change.notify_all()

    def close(self) -> None:
        """Ends the thread once nothing is left to be sent."""
        with self._change:
            self._closed = True
            self._change.notify_all()

    def check(self) -> None:
        """UserError if another session was seen to have taken the lease."""
        if self._taken is not None:
            raise self._taken

    def events(self) -> list[Event]:
        """What became of checkpoints since the last call: for the log its `step`; `seconds` and `bytes` if it arrived,
        else why it `failed`, or that it was `skipped`."""
        return [self._events.get() for _ in range(self._events.qsize())]  # only this thread takes some

    def wait_until_done(self, deadline: float = math.inf) -> Iterator[None]:
        """Ends when nothing is left to be sent, or all attempts have failed, or the monotonic clock is there; yields
        often."""
        told = time.monotonic()
        while self._thread.is_alive() and self._has_work() and time.monotonic() < deadline:
            if time.monotonic() - told > PROGRESS_SECONDS:
                told = time.monotonic()
                print(f"waiting until the last checkpoint is in {self._remote.url}", flush=True)
            time.sleep(0.02)
            yield

    def _has_work(self) -> bool:
        with self._change:
            return self._busy or self._waiting is not None or self._files

    def _work(self) -> None:
        """The thread: a checkpoint, then the small files, whenever there are some."""
        while self._take():
            upload = self._on_its_way
            if upload is None or self._send(upload):
                self._send_files(upload)

    def _take(self) -> bool:
        """Waits for the next checkpoint, or for files alone; the one before is no longer on its way. False once it is
        closed and nothing is left."""
        with self._change:
            self._on_its_way, self._busy = None, False
            self._change.wait_for(lambda: self._waiting is not None or self._files or self._closed)
            self._on_its_way, self._waiting = self._waiting, None
            self._busy = self._on_its_way is not None or self._files
            return self._busy

    def _send(self, upload: Upload) -> bool:
        """Whether it is there then; else that is reported."""
        began, folder, step = time.monotonic(), upload.folder, step_of(upload.folder)

        def act() -> None:
            try:
                sent = upload_checkpoint(self._remote, folder, self._lease.check, is_new=upload.is_new)
            except Exception:
                if not _is_gone(folder):
                    raise
            else:
                self._events.put(Event({"step": step, "seconds": round(time.monotonic() - began, 3), "bytes": sent}))

        return self._attempt(act, {"step": step}, f"step {step:,} is not in the remote store, only in {folder}")

    def _send_files(self, sent: Upload | None) -> None:
        """The run's small files; before them, removes what a checkpoint that was `sent` makes superfluous."""
        with self._change:
            self._files = False  # those that change from now on are offered once more

        def act() -> None:
            if sent is not None:
                remove_superseded(self._remote, sent.folder.name, self._rules)
            self._put(self._folder.metrics, self._folder.ending)

        self._attempt(act, {}, "the run's log is not in the remote store")

    def _attempt(self, act: Callable[[], None], fields: dict[str, Any], failure: str) -> bool:
        """Whether one of several attempts succeeded; else the `failure` is reported. A newer checkpoint ends them: it
        takes this one's place."""
        reason = ""
        for pause in RETRY_DELAYS:
            with self._change:
                is_passed_over = self._change.wait_for(lambda: self._waiting is not None, pause)
            if is_passed_over and reason:
                break
            try:
                self._begin()
                act()
            except LeaseLostError as error:
                self._taken, reason = error, str(error)
                break
            except Exception as error:
                reason = str(error) if isinstance(error, UserError) else repr(error)
            else:
                return True
        self._events.put(Event({**fields, "failed": reason}, f"{failure}: {reason}"))
        return False

    def _begin(self) -> None:
        """Also whenever something is sent later: another session may have begun since, or somebody emptied the
        store."""
        self.check()
        if self._lease.acquire():
            self._begun = False
        if not self._begun:
            self._remote.store.remove(self._folder.ending.name)
            tokenizers = self._folder.tokenizer_json, self._folder.tokenizer_model
            self._put(self._folder.config, *tokenizers, self._folder.published_files)
            self._begun = True

    def _put(self, *paths: Path) -> None:
        """Sends small files, as far as they are there."""
        for path in paths:
            with suppress(FileNotFoundError):
                content = path.read_bytes()
                self._remote.store.write(path.name, content)


def _is_gone(folder: Path) -> bool:
    """Whether somebody removed it; False where the disk cannot tell."""
    with suppress(OSError):
        return not folder.is_dir()
    return False
