"""Uploads a run's checkpoints to a remote store in a thread, asynchronously to training."""

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
from megahead.checkpoints.store import Ancestry, Event, Latest, RetentionRules, orphans, retain, step_of
from megahead.errors import UserError
from megahead.run_folder import RunFolder

# Uploads a checkpoint: files, manifest, `latest`. Superseded checkpoints are removed afterwards.


def upload_checkpoint(remote: RemoteStorage, folder: Path, check_lease: Callable[[], None], *, is_new: bool) -> int:
    """Uploads a checkpoint (see `RemoteStorage.put`) and returns the bytes sent. It becomes `latest` if the session has
    saved it (`is_new`), or if it continues or orphans the remote's latest."""
    sent = remote.put(folder, check_lease)
    latest, manifest = remote.latest.name, Manifest.read(folder)
    ancestry = Ancestry.of(folder.name, manifest)
    if is_new or latest is None or ancestry.supersedes(latest) or latest not in remote.names():
        remote.write_latest(Latest(folder.name, manifest.parents))
    return sent


def remove_superseded(remote: RemoteStorage, name: str, rules: RetentionRules) -> None:
    """Removes partial uploads and, if `name` is the latest checkpoint, orphans and older ones by `rules`."""
    remote.remove_partial(excluded=name)
    if remote.latest.name == name:
        for orphan in orphans(remote):
            remote.remove(orphan)
        retain(remote, rules)


# The upload thread: the current checkpoint, the next one, and the run's small files.


RETRY_DELAYS = (0.0, 1.0, 10.0)
"""Seconds before each attempt."""

PROGRESS_SECONDS = 10.0
"""Interval of messages while the run waits for its last upload."""


@dataclass(frozen=True)
class Upload:
    """A queued checkpoint."""

    folder: Path

    is_new: bool
    """Whether the session has saved it, and has not only started from it."""


class Uploader:
    """Rank 0's uploads of its run to a store. No method blocks.

    Checkpoints are uploaded one at a time; of those saved during an upload only the newest follows. Failed uploads are
    retried, then reported; they do not end the run, nor the upload of the next checkpoint.
    """

    def __init__(self, remote: RemoteStorage, folder: RunFolder, lease: RemoteLease, rules: RetentionRules) -> None:
        """`rules`: which checkpoints are kept in the store."""
        self._remote, self._folder, self._lease, self._rules = remote, folder, lease, rules
        self._condition = threading.Condition()
        self._next: Upload | None = None
        self._current: Upload | None = None
        self._files_changed = True
        self._is_busy = self._is_closed = self._has_sent_config = False
        self._lease_error: LeaseLostError | None = None
        self._events = SimpleQueue[Event]()
        self._thread = threading.Thread(target=self._run, name="uploads", daemon=True)
        self._thread.start()

    def enqueue(self, folder: Path, *, is_new: bool = True) -> None:
        """Queues a complete checkpoint, instead of the one that waits; see `upload_checkpoint`."""
        with self._condition:
            skipped, self._next = self._next, Upload(folder, is_new)
            self._condition.notify_all()
            if skipped is not None and skipped.is_new and skipped.folder.name not in self.in_use:
                step, reason = step_of(skipped.folder), "since an older one is still on its way to"
                message = f"step {step:,} is not copied to the remote store, {reason} {self._remote.url}"
                self._events.put(Event({"step": step, "skipped": True}, message))

    @property
    def in_use(self) -> set[str]:
        """Names of checkpoints that must stay on disk, since they are queued or being uploaded."""
        with self._condition:
            return {upload.folder.name for upload in (self._current, self._next) if upload is not None}

    def enqueue_files(self) -> None:
        """Queues the run's small files, which have changed."""
        with self._condition:
            self._files_changed = True
            self._condition.notify_all()

    def close(self) -> None:
        """Ends the thread when its queue is empty."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()

    def check(self) -> None:
        """LeaseLostError if another session has taken the lease."""
        if self._lease_error is not None:
            raise self._lease_error

    def events(self) -> list[Event]:
        """Events since the last call, with fields `step`, and `seconds` and `bytes` of an upload, why it `failed`, or
        that it was `skipped`."""
        return [self._events.get() for _ in range(self._events.qsize())]  # only this thread gets events

    def wait_until_done(self, deadline: float = math.inf) -> Iterator[None]:
        """Waits until the queue is empty or the monotonic clock reaches `deadline`; yields often."""
        last_message_time = time.monotonic()
        while self._thread.is_alive() and self._has_work() and time.monotonic() < deadline:
            if time.monotonic() - last_message_time > PROGRESS_SECONDS:
                last_message_time = time.monotonic()
                print(f"waiting until the last checkpoint is in {self._remote.url}", flush=True)
            time.sleep(0.02)
            yield

    def _has_work(self) -> bool:
        with self._condition:
            return self._is_busy or self._next is not None or self._files_changed

    def _run(self) -> None:
        """The thread's loop: uploads a checkpoint, then the small files."""
        while self._wait_for_work():
            upload = self._current
            if upload is None or self._send(upload):
                self._send_files(upload)

    def _wait_for_work(self) -> bool:
        """Waits for the next checkpoint or for changed files; False once it is closed and the queue is empty."""
        with self._condition:
            self._current, self._is_busy = None, False
            self._condition.wait_for(lambda: self._next is not None or self._files_changed or self._is_closed)
            self._current, self._next = self._next, None
            self._is_busy = self._current is not None or self._files_changed
            return self._is_busy

    def _send(self, upload: Upload) -> bool:
        """Uploads a checkpoint; returns whether it succeeded, or was removed from the disk."""
        start_time, folder, step = time.monotonic(), upload.folder, step_of(upload.folder)

        def action() -> None:
            try:
                sent = upload_checkpoint(self._remote, folder, self._lease.check, is_new=upload.is_new)
            except Exception:
                if not _is_gone(folder):
                    raise
            else:
                self._events.put(
                    Event({"step": step, "seconds": round(time.monotonic() - start_time, 3), "bytes": sent})
                )

        return self._attempt(action, {"step": step}, f"step {step:,} is not in the remote store, only in {folder}")

    def _send_files(self, upload: Upload | None) -> None:
        """Uploads the run's small files, after it has removed checkpoints that `upload` supersedes."""
        with self._condition:
            self._files_changed = False  # later changes are uploaded again

        def action() -> None:
            if upload is not None:
                remove_superseded(self._remote, upload.folder.name, self._rules)
            self._put(self._folder.metrics, self._folder.session_end)

        self._attempt(action, {}, "the run's log is not in the remote store")

    def _attempt(self, action: Callable[[], None], fields: dict[str, Any], failure: str) -> bool:
        """Runs `action`, with retries unless a newer checkpoint is queued; returns whether it succeeded, and reports a
        `failure`."""
        reason = ""
        for delay in RETRY_DELAYS:
            with self._condition:
                is_superseded = self._condition.wait_for(lambda: self._next is not None, delay)
            if is_superseded and reason:
                break
            try:
                self._prepare()
                action()
            except LeaseLostError as error:
                self._lease_error, reason = error, str(error)
                break
            except Exception as error:
                reason = str(error) if isinstance(error, UserError) else repr(error)
            else:
                return True
        self._events.put(Event({**fields, "failed": reason}, f"{failure}: {reason}"))
        return False

    def _prepare(self) -> None:
        """Takes the lease and uploads the config, again if the store was emptied."""
        self.check()
        if self._lease.acquire():
            self._has_sent_config = False
        if not self._has_sent_config:
            self._remote.store.remove(self._folder.session_end.name)
            tokenizers = self._folder.tokenizer_json, self._folder.tokenizer_model
            self._put(self._folder.config, *tokenizers, self._folder.source_hf_files)
            self._has_sent_config = True

    def _put(self, *paths: Path) -> None:
        """Uploads small files that exist."""
        for path in paths:
            with suppress(FileNotFoundError):
                content = path.read_bytes()
                self._remote.store.write(path.name, content)


def _is_gone(folder: Path) -> bool:
    """Whether the folder was removed; False if the disk cannot be read."""
    with suppress(OSError):
        return not folder.is_dir()
    return False
