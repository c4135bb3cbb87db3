"""Saves a run's checkpoints: on disk, in memory, in an object store, by one session at a time."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from math import inf
from pathlib import Path

from megahead.checkpoints.disk import write_snapshot
from megahead.checkpoints.fetch import fetch_named, small_files
from megahead.checkpoints.format import run_on_all_ranks, run_on_first_rank
from megahead.checkpoints.memory import Replicas
from megahead.checkpoints.reading import Checkpoint
from megahead.checkpoints.remote import Remote, RemoteState, read_state, retry_seconds
from megahead.checkpoints.store import Event, KeepRules
from megahead.checkpoints.upload import Uploads
from megahead.config.run import RunConfig
from megahead.distributed.group import Group
from megahead.errors import CheckpointError, UserError
from megahead.files import read_if_exists, write_atomically
from megahead.remote_files import is_below, is_remote
from megahead.run_folder import RunFolder
from megahead.train.datasets import RunDatasets, data_fingerprints, require_same_run
from megahead.train.faults import Ending, StopRequest
from megahead.train.progress import CapturedCheckpoint, Progress

# A session's lease on its run's folder, so that of two sessions there only the later one writes.
#
# torchrun's agents may give a node up that only its network had left: it still trains, while the others begin again
# from the newest checkpoint. Whoever begins last has the folder.


def new_session_id() -> str:
    """One that no other session has."""
    return f"{socket.gethostname()}, process {os.getpid()} ({secrets.token_hex(4)})\n"


class Lease:
    """Taken when it is made. Between `check` and what is written then another session may still begin."""

    def __init__(self, file: Path, session_id: str) -> None:
        self._file = file
        self.session_id = session_id
        """What the file holds now."""
        write_atomically(file, self.session_id)

    def check(self) -> None:
        """UserError if another session has begun since."""
        there = read_if_exists(self._file)  # None where it cannot be read just now: no sign of another session
        if there not in (None, self.session_id.encode()):
            raise UserError(
                f"output_dir must have one session at a time, but in {self._file.parent} another has begun "
                f"on {str(there, errors='replace').strip()}; this one ends, and what it has not saved is the other's "
                "to do again."
            )

    def release(self) -> None:
        """Leaves the folder to whoever comes."""
        if read_if_exists(self._file) == self.session_id.encode():
            self._file.unlink(missing_ok=True)


# Keeps a run's state in all its places.


class Checkpointer:
    """Puts the state of the complete run into its places: the run's folder, the memory of nodes every
    `training.replicate_every` steps, and the remote store after each save. Every method but `due` and `events` is
    collective.

    In the background, training waits only while weights are copied; a second save waits for the first. If a background
    save fails, `wait` raises its error; once `failed` is true on any rank, all ranks must call `wait`. A replica waits
    neither for files nor for other nodes: while the last one is on its way, those that are due are left out, and what
    goes wrong ends replicas, and nothing else. A state with numbers that are not finite is not saved.
    """

    def __init__(
        self,
        progress: Progress,
        rules: KeepRules,
        lease: Lease | None,
        uploads: Uploads | None,
        replicas: Replicas | None,
    ) -> None:
        """`rules`: of the run; `lease`, `uploads`: rank 0's, if the run has one. Each checkpoint is given to it."""
        training = progress.phase.config.training
        self._progress, self._lease, self._uploads, self._replicas = progress, lease, uploads, replicas
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="save") if training.save_in_background else None
        # a gloo connection of its own, since another thread may use it at the same time
        self._group = progress.world_group.new_gloo_group() if self._pool else progress.world_group
        self._replicate_every, self._skipped = training.replicate_every or 0, 0
        self._rules = rules if uploads is None else replace(rules, in_use=lambda: uploads.in_use)
        self._pending: Future[Path] | None = None
        self._events: list[Event] = []
        run = progress.history
        self._saved_at = self._reached() if run.ancestry.step == progress.state.step else None
        self._folder = run.root / str(run.ancestry.newest) if self.up_to_date else None

    def _reached(self) -> tuple[int, int]:
        return self._progress.state.step, self._progress.state.samples

    @property
    def up_to_date(self) -> bool:
        """Whether the current state is saved."""
        return self._saved_at == self._reached()

    @property
    def failed(self) -> bool:
        """Whether a save in the background has gone wrong (as far as this rank knows)."""
        return self._pending is not None and self._pending.done() and self._pending.exception() is not None

    def save(self) -> float:
        """Saves, and returns the seconds that training waited for it."""
        started = time.monotonic()
        self.wait()
        captured = self._progress.capture(self._group, copied=self._pool is not None)
        self._progress.history.ancestry.add(captured.header.name)
        if self._pool:
            self._pending = self._pool.submit(self._write, captured)
        else:
            self._folder = self._write(captured)
        self._saved_at = self._reached()
        return time.monotonic() - started

    def wait(self) -> Path | None:
        """Waits until a background save is on disk, and raises its error. Returns the last folder saved,
        at first that of the resumed checkpoint; None if there is none in the run's folder yet."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._folder = pending.result()
        return self._folder

    def events(self) -> list[Event]:
        """What became of checkpoints in memory, and on their way to the remote store, since the last call."""
        events, self._events = self._events, []
        return events if self._uploads is None else [*events, *self._uploads.events()]

    def _write(self, captured: CapturedCheckpoint) -> Path:
        """Unless a number is not finite on any rank, or another session has taken the folder or the remote store."""
        checks = [captured.check_finite, *(each.check for each in (self._lease, self._uploads) if each is not None)]
        run_on_all_ranks(self._group, lambda: [check() for check in checks])
        root = self._progress.history.root
        folder = write_snapshot(root, captured.header, captured.snapshot, self._group, self._rules)
        if self._uploads is not None:
            self._uploads.enqueue(folder)
        return folder

    def replica_due(self, step: int) -> bool:
        """Whether behind that step the state is kept though it is not saved: in memory."""
        return self._replicas is not None and step % self._replicate_every == 0

    def replicate_if_due(self, step: int) -> None:
        """Behind an applied step that is not saved: keeps the state if that is due."""
        if self.replica_due(step):
            self._events.append(self.replicate())

    def replicate(self) -> Event:
        """Begins a replica of the present state, if the last one is complete. For the log: `stall_seconds` that
        training waited and `bytes` of the state; or how many were `skipped` so far, or why replicas are `off`."""
        began, replicas, step = time.monotonic(), self._replicas, self._progress.state.step
        assert replicas is not None
        try:
            if not replicas.may_begin():
                self._skipped += 1
                message = f"step {step:,}: the copy in memory is not renewed, since the last one is still on its way"
                return Event({"skipped": self._skipped}, message if self._skipped == 1 else None, "copy")
        except CheckpointError as error:
            self._replicas = None
            replicas.close()
            return Event({"off": str(error)}, f"step {step:,}: no more copies in memory: {error}", "copy")
        captured = self._progress.capture(self._progress.world_group, copied=True)
        replicas.begin(captured.header, captured.snapshot, captured.check_finite)
        fields = {"stall_seconds": round(time.monotonic() - began, 3), "bytes": captured.snapshot.total_bytes}
        return Event(fields, record="copy")

    def before_rollback(self) -> None:
        """Waits until a background save is on disk, and forgets replicas: the run goes back to an older state."""
        self.wait()
        if self._replicas is not None:
            self._replicas.discard()


# A run and its remote checkpoints: what a session finds and fetches there, and how long it waits for what it sends.


SECONDS_AFTER_SIGNAL = 20.0
"""How long after its signal a session that torchrun's agent has asked to stop may still wait for its uploads: ranks are
killed after 30 s. What is missing then, the next session sends."""


def read_remote_state(resume: str, config: RunConfig, world_group: Group) -> RemoteState:
    """What the run's remote checkpoints are when a session begins. Collective; CheckpointError if they are another
    run's, or cannot be used."""
    url = config.training.remote_checkpoints
    if url is None:
        return RemoteState()
    timeout = retry_seconds(world_group)
    return run_on_first_rank(world_group, lambda: read_state(Remote.of(url, timeout), config.folder(), resume))


def resolve_resume(resume: str, config: RunConfig, datasets: RunDatasets, world_group: Group) -> str:
    """What `--resume` asks for; a checkpoint at a URL is fetched, and its folder on this disk named instead.

    One of the run's own remote checkpoints becomes one of the run's checkpoints. Collective; CheckpointError if it is
    of a run that may not be resumed, or the store cannot be read.
    """
    if not is_remote(resume):
        return resume
    url, folder, accept = config.training.remote_checkpoints, config.folder(), accepting(resume, config, datasets)
    if url is None or not is_below(resume, url):
        return str(fetch_named(resume, RunFolder(folder.fetched_checkpoints), world_group, accept))

    def files() -> dict[Path, bytes]:
        log = [] if folder.metrics.exists() else [folder.metrics]
        return small_files(url, world_group, *log, folder.run_id)

    return str(fetch_named(resume, folder, world_group, accept, files))


def accepting(url: str, config: RunConfig, datasets: RunDatasets) -> Callable[[Checkpoint], None]:
    """What raises CheckpointError for a checkpoint at `url` that the run may not go on from."""
    fingerprints = data_fingerprints(config, datasets)

    def accept(found: Checkpoint) -> None:
        try:
            require_same_run(found, config, fingerprints)
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(str(found.folder), f"{url} (step {found.step:,})")) from None

    return accept


def upload_deadline(ending: Ending, stop: StopRequest, restarts_ranks: bool) -> float:
    """Time on the monotonic clock until which a session that ends may wait for its uploads.

    `restarts_ranks`: the launcher restarts ranks, and kills those that it asked to stop after some seconds."""
    if ending != "stopped" or not restarts_ranks:
        return inf
    return (stop.received_at or time.monotonic()) + SECONDS_AFTER_SIGNAL
