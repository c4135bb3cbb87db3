"""Saves a run's checkpoints on disk, in memory and in an object store, in one session at a time."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from megahead.checkpoints.disk import write_snapshot
from megahead.checkpoints.format import run_on_all_ranks
from megahead.checkpoints.memory import ReplicaWriter
from megahead.checkpoints.store import Event, RetentionRules
from megahead.checkpoints.transfer import Uploader
from megahead.distributed.watchdog import is_communication_error
from megahead.errors import CheckpointError, UserError
from megahead.files import read_if_exists, write_atomically
from megahead.train.progress import CapturedCheckpoint, Progress

# A session's lease on its run's folder: of two sessions only the one that started later writes.
#
# torchrun's agents may lose contact with a node that continues to train; the other nodes then restart from the newest
# checkpoint, and take over the folder.


def new_session_id() -> str:
    """A unique id, with this process's host and process id."""
    return f"{socket.gethostname()}, process {os.getpid()} ({secrets.token_hex(4)})\n"


class Lease:
    """Creating a lease acquires it. Another session may still take over between `check` and the following write."""

    def __init__(self, file: Path, session_id: str) -> None:
        self._file = file
        self.session_id = session_id
        """The content of the file while the lease is valid."""
        write_atomically(file, self.session_id)

    def check(self) -> None:
        """UserError if another session has taken over, even if it has ended and released its lease since."""
        try:
            holder = self._file.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            holder = ""
        except OSError:  # does not indicate another session
            return
        if holder != self.session_id:
            other = f"begun on {holder.strip()}" if holder else "begun and ended (or `session` was removed)"
            raise UserError(
                f"output_dir must have one session at a time, but in {self._file.parent} another has {other}; this one "
                "ends, and the other repeats what this one has not saved."
            )

    def release(self) -> None:
        """Removes the file, unless another session has taken over."""
        if read_if_exists(self._file) == self.session_id.encode():
            self._file.unlink(missing_ok=True)


class Checkpointer:
    """Saves the complete state of the run in its folder, uploads each checkpoint to the remote store, and replicates
    the state in the memory of nodes every `training.replicate_every` steps. Methods are collective except
    `replica_due` and `events`.

    A background save blocks training only while weights are copied. A second save waits for the first. If a save fails,
    `wait` raises its error; once `failed` is true on any rank, all ranks must call `wait`. Training never waits for a
    replica's files or other nodes: a replica is skipped while the last one is in progress, and an error only disables
    replicas. A state with numbers that are not finite is not saved.
    """

    def __init__(
        self,
        progress: Progress,
        rules: RetentionRules,
        lease: Lease | None,
        uploads: Uploader | None,
        replicas: ReplicaWriter | None,
    ) -> None:
        """`rules`: which checkpoints are kept; `lease`, `uploads`: rank 0's, if any; `replicas`: if enabled."""
        training = progress.phase.config.training
        self._progress, self._lease, self._uploads, self._replicas = progress, lease, uploads, replicas
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="save") if training.save_in_background else None
        # a separate group for the background thread
        self._group = progress.world_group.new_gloo_group() if self._pool else progress.world_group
        self._replicate_every, self._skipped_replicas = training.replicate_every or 0, 0
        self._rules = rules if uploads is None else replace(rules, in_use=lambda: uploads.in_use)
        self._pending: Future[Path] | None = None
        self._events: list[Event] = []
        history = progress.history
        self._saved_position = self._position() if history.ancestry.step == progress.state.step else None
        self._last_checkpoint = history.root / str(history.ancestry.newest) if self.up_to_date else None

    def _position(self) -> tuple[int, int]:
        return self._progress.state.step, self._progress.state.samples

    @property
    def up_to_date(self) -> bool:
        """Whether the current state is saved."""
        return self._saved_position == self._position()

    @property
    def failed(self) -> bool:
        """Whether a background save has failed on this rank."""
        return self._pending is not None and self._pending.done() and self._pending.exception() is not None

    def save(self) -> float:
        """Saves the state; returns the seconds for which it blocked training."""
        start_time = time.monotonic()
        self.wait()
        captured = self._progress.capture(self._group, copied=self._pool is not None)
        self._progress.history.ancestry.add(captured.header.name)
        if self._pool:
            self._pending = self._pool.submit(self._write, captured)
        else:
            self._last_checkpoint = self._write(captured)
        self._saved_position = self._position()
        return time.monotonic() - start_time

    def wait(self) -> Path | None:
        """Waits until a background save is on disk, and raises its error. Returns the run's last checkpoint (at first
        the resumed one, if it is in the run's folder), or None."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._last_checkpoint = pending.result()
        return self._last_checkpoint

    @contextmanager
    def completing_save(self) -> Iterator[None]:
        """After an error in the block waits until a background save is on disk, as long as ranks wait for each other:
        the end of the process would discard it. Not if ranks are lost, or another session has taken over."""
        try:
            yield
        except Exception as error:
            if self._pending is not None and not is_communication_error(error):
                with suppress(UserError):
                    if self._lease is not None:
                        self._lease.check()
                    wait([self._pending], self._group.timeout_seconds)
            raise

    def events(self) -> list[Event]:
        """The events of replicas and uploads since the last call."""
        events, self._events = self._events, []
        return events if self._uploads is None else [*events, *self._uploads.events()]

    def _write(self, captured: CapturedCheckpoint) -> Path:
        """Writes the checkpoint; an error if a number is not finite on any rank, or another session has taken over."""
        leases = [lease for lease in (self._lease, self._uploads) if lease is not None]
        checks = [captured.check_finite, *(lease.check for lease in leases)]
        run_on_all_ranks(self._group, lambda: [check() for check in checks])
        root = self._progress.history.root
        folder = write_snapshot(root, captured.header, captured.snapshot, self._group, self._rules)
        if self._uploads is not None:
            self._uploads.enqueue(folder)
        return folder

    def replica_due(self, step: int) -> bool:
        """Whether the state after `step` is to be replicated in memory, if it is not saved."""
        return self._replicas is not None and step % self._replicate_every == 0

    def replicate_if_due(self, step: int) -> None:
        """Replicates the state after an applied step, if that is due."""
        if self.replica_due(step):
            self._events.append(self.replicate())

    def replicate(self) -> Event:
        """Starts a replica of the present state, if the last one is complete. Returns an event with the `stall_seconds`
        for which it blocked training and the `bytes` of the state; or with the number of replicas `skipped` so far, or
        with the reason why replicas are `off`."""
        start_time, replicas, step = time.monotonic(), self._replicas, self._progress.state.step
        assert replicas is not None
        try:
            if not replicas.can_start():
                self._skipped_replicas += 1
                message = f"step {step:,}: the copy in memory is not renewed, since the last one is still on its way"
                count = self._skipped_replicas
                return Event({"skipped": count}, message if count == 1 else None, "copy")
        except CheckpointError as error:
            self._replicas = None
            replicas.close()
            return Event({"off": str(error)}, f"step {step:,}: no more copies in memory: {error}", "copy")
        captured = self._progress.capture(self._progress.world_group, copied=True)
        replicas.start(captured.header, captured.snapshot, captured.check_finite)
        fields = {"stall_seconds": round(time.monotonic() - start_time, 3), "bytes": captured.snapshot.total_bytes}
        return Event(fields, record="copy")

    def before_rollback(self) -> None:
        """Waits until a background save is on disk, and discards replicas, which are newer than the restored state."""
        self.wait()
        if self._replicas is not None:
            self._replicas.discard()
