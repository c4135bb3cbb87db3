"""Checkpoints to and from an object store: rank 0 fetches them, all ranks verify them; a thread uploads them."""

from __future__ import annotations

import fcntl
import math
import re
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from megahead.checkpoints.disk import DiskStorage, Source, copy_newest_valid, is_complete
from megahead.checkpoints.format import MANIFEST, Manifest, check_files, run_generator_on_all_ranks, run_on_first_rank
from megahead.checkpoints.reading import SINGLE_RANK, Checkpoint, RecoveryResult, open_verified
from megahead.checkpoints.remote import (
    CHECKPOINTS,
    LeaseLostError,
    RemoteLease,
    RemoteStorage,
    find_remote,
    newer_names,
    read_ancestry,
    retry_seconds,
)
from megahead.checkpoints.store import (
    Ancestry,
    Event,
    Latest,
    RetentionRules,
    is_checkpoint_name,
    new_checkpoint_name,
    step_of,
)
from megahead.distributed.group import Group
from megahead.errors import CheckpointError, UserError
from megahead.files import fsync, write_atomically, write_synced
from megahead.remote_files import DamagedError, ExpectedFile, Store, cache_folder, download, join_url, with_progress
from megahead.run_folder import RunFolder
from megahead.wording import print_line

# Fetching and verification; collective.


SmallFiles = Callable[[], Generator[None, None, dict[Path, bytes]]]
"""Starts `read_small_files`."""


def fetch_newer(
    newer_than: int, url: str, folder: RunFolder, group: Group, validate: Callable[[Checkpoint], None]
) -> RecoveryResult | None:
    """Fetches the newest valid checkpoint at `url` into `folder`, with its log and run id, if it is newer than step
    `newer_than`, or if the remote run rolled back past one in `folder`; otherwise returns None. Collective;
    CheckpointError if the store cannot be read.

    `validate` may raise on rank 0 before the download. The log calls the remote store `mirror`.
    """
    start_time, disk = time.monotonic(), DiskStorage(folder.checkpoints)

    def find_newer() -> tuple[RemoteStorage, list[str]]:
        remote = RemoteStorage.of(url, retry_seconds(group))
        return remote, newer_names(remote, folder, newer_than)

    files = partial(read_small_files, url, group, folder.metrics, folder.run_id)
    name, damage = copy_newest_valid(_Fetch(find_newer, disk, group, validate, files), disk, group)
    if name is None:
        return RecoveryResult("mirror", None, damage) if damage else None
    run_on_first_rank(group, lambda: disk.write_latest(Latest(name, disk.manifest(name).ancestors)))
    checkpoint, seconds = open_verified(disk.root / name, group), time.monotonic() - start_time
    message = f"step {checkpoint.step:,} from {url} in {seconds:.1f} s"
    details = {"fetched": checkpoint.step, "seconds": round(seconds, 3)}
    return RecoveryResult("mirror", checkpoint, damage, message, details)


def read_small_files(url: str, group: Group, *paths: Path) -> Generator[None, None, dict[Path, bytes]]:
    """Returns the contents of those `paths` that exist in the run at `url`. Yields at least once a second, since the
    log of a long run is larger than one request allows."""
    store, content_by_path = Store(url, retry_seconds(group)), dict[Path, bytes]()
    for path in paths:
        with suppress(FileNotFoundError):
            content = bytearray()
            for block in store.blocks(path.name, store.size(path.name)):
                content += block
                yield
            content_by_path[path] = bytes(content)
    return content_by_path


def fetch_checkpoint(
    url: str,
    into: RunFolder,
    group: Group = SINGLE_RANK,
    validate: Callable[[Checkpoint], None] = lambda _: None,
    files: SmallFiles | None = None,
) -> Path:
    """Fetches the newest valid checkpoint at a URL (see `find_remote`) into `into`, unless it is there already, and
    returns its folder. Skips those that the run in `into` has orphaned (rolled back past), reports damaged ones, and
    leaves `latest` unchanged. `validate` may raise before the download; `files` reads small files to write with
    it. Collective; CheckpointError if there is none."""

    def find() -> tuple[RemoteStorage, list[str]]:
        remote, names = find_remote(url, retry_seconds(group))
        skipped = read_ancestry(into).orphaned if len(names) > 1 else ()
        return remote, [name for name in names if name not in skipped]

    disk = DiskStorage(into.checkpoints)
    name, damage = copy_newest_valid(_Fetch(find, disk, group, validate, files), disk, group)
    if name is None:
        raise CheckpointError(
            f"`{url}` must be a checkpoint, or the folder of a run that has one, but holds none that is valid"
            f"{': ' if damage else '.'}{' '.join(damage)}"
        )
    for problem in damage if group.rank == 0 else ():
        print_line(f"skipped: {problem}", sys.stderr)
    return disk.root / name


@dataclass
class _Fetch(Source):
    """The remote checkpoints that `find` returns, best first; rank 0 fetches them.

    `find` is called again after each damaged one: a running session may have replaced it by a newer one. `files` are
    read before the download, so that errors come early. They are written before the checkpoint gets its final name,
    since a complete checkpoint is not fetched again.
    """

    find: Callable[[], tuple[RemoteStorage, list[str]]]
    disk: DiskStorage
    group: Group
    validate: Callable[[Checkpoint], None]
    files: SmallFiles | None
    tried: list[str] = field(default_factory=list)

    def select_next(self) -> Generator[None, None, tuple[str | None, int]]:
        """Returns the next checkpoint's name on disk (None: none is left) and its bytes (0: it is on disk already).
        Yields between slow reads, so that the ranks that wait for this one do not time out."""
        if self.group.rank != 0:
            return None, 0
        self.remote, names = self.find()
        yield
        name = next((name for name in names if name not in self.tried), None)
        if name is None:
            return None, 0
        self.tried.append(name)
        try:
            self.manifest_bytes, self.manifest = self.remote.manifest_with_bytes(name)
        except CheckpointError as error:
            raise DamagedError(str(error)) from None
        self.validate(Checkpoint(self.disk.root / name, self.manifest))
        self.contents, local_name = (yield from self.files()) if self.files else {}, self._local_name(name)
        if is_complete(self.disk.root / local_name):
            with suppress(CheckpointError):
                yield from check_files(self.disk.root / local_name, self.manifest.files)
                _write_files(self.contents)
                return local_name, 0
        return local_name, self.manifest.total_bytes

    def _local_name(self, name: str) -> str:
        """The name of an identical checkpoint on disk; else `name`; a new name if another checkpoint has `name`
        (earlier versions reused names)."""
        for local_name in self.disk.names():
            folder = self.disk.root / local_name
            is_same_step = step_of(local_name) == self.manifest.step
            if is_same_step and is_complete(folder) and (folder / MANIFEST).read_bytes() == self.manifest_bytes:
                return local_name
        is_free = is_checkpoint_name(name) and not is_complete(self.disk.root / name)
        return name if is_free else new_checkpoint_name(self.manifest.step)

    def write(self, partial_folder: Path) -> Iterator[None]:
        if self.group.rank != 0:
            return iter(())
        name = self.tried[-1]
        received = _fetch_files(self.remote, name, partial_folder, self.manifest)
        return with_progress(received, join_url(self.remote.url, self.remote.path(name)), self.manifest.total_bytes)

    def write_manifest(self, partial_folder: Path, results: list[Any]) -> None:
        (partial_folder / MANIFEST).write_bytes(self.manifest_bytes)
        fsync(partial_folder / MANIFEST)
        _write_files(self.contents)


def _write_files(contents: Mapping[Path, bytes]) -> None:
    for path, content in contents.items():
        write_atomically(path, content)


def _fetch_files(remote: RemoteStorage, name: str, partial_folder: Path, manifest: Manifest) -> Iterator[int]:
    """Writes all files; yields the total bytes received so far."""
    previous_bytes = 0
    for file, entry in manifest.files.items():
        with (partial_folder / file).open("xb") as target:
            expected = ExpectedFile(entry.bytes, entry.sha256)
            for received in download(remote.store, remote.path(name, file), expected, partial(write_synced, target)):
                yield previous_bytes + received
        previous_bytes += entry.bytes


def fetch_to_cache(url: str) -> Path:
    """Fetches the newest valid checkpoint at a URL into this machine's cache, with the run's tokenizer and log."""
    run = RunFolder(cache_folder(url))
    # The URL of the run, from that of its checkpoints folder or of one checkpoint. A run may have such a URL, too.
    run_url = re.sub(rf"/{CHECKPOINTS}(/(step-)?\d+(-[0-9a-f]+)?)?/*$", "", url)
    with _locked(run):
        folder = fetch_checkpoint(url, run)
        paths = run.tokenizer_json, run.tokenizer_model, run.source_hf_files, run.metrics
        reads = (read_small_files(place, SINGLE_RANK, *paths) for place in (url, run_url))
        files = (run_generator_on_all_ranks(SINGLE_RANK, read)[0] for read in reads)
        _write_files(next(filter(None, files), {}))
    return folder


@contextmanager
def _locked(run: RunFolder) -> Iterator[None]:
    """Excludes other processes of this machine, which would remove the partial checkpoint in the same folder."""
    run.path.mkdir(parents=True, exist_ok=True)
    with (run / "turn").open("w") as file:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


# Uploads: a checkpoint's files, its manifest, `latest`; then superseded checkpoints are removed.


def upload_checkpoint(remote: RemoteStorage, folder: Path, check_lease: Callable[[], None], *, is_new: bool) -> int:
    """Uploads a checkpoint (see `RemoteStorage.put`) and returns the bytes sent. It becomes `latest` if the session has
    saved it (`is_new`), or if it continues or orphans the remote's latest."""
    sent = remote.put(folder, check_lease)
    latest, manifest = remote.latest.name, Manifest.read(folder)
    ancestry = Ancestry.of(folder.name, manifest)
    if is_new or latest is None or ancestry.supersedes(latest) or latest not in remote.names():
        remote.write_latest(Latest(folder.name, manifest.ancestors))
    return sent


def remove_superseded(remote: RemoteStorage, name: str, rules: RetentionRules) -> None:
    """Removes partial uploads and, if `name` is the latest checkpoint, those that are not its ancestors (orphans), and
    older ones by `rules`."""
    remote.remove_partial(excluded=name)
    if remote.latest.name == name:
        for orphan in remote.orphans():
            remote.remove(orphan)
        remote.retain(rules)


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
    """Rank 0's uploads of its run to a store. Only `wait_until_done` blocks.

    Checkpoints are uploaded one at a time; of those saved during an upload only the newest is uploaded. Failed uploads
    are retried, then reported; they do not end the run, nor the upload of the next checkpoint.
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
        """Events since the last call. Fields: `step`; `seconds` and `bytes` of an upload; `failed`, the reason; or
        `skipped`."""
        return [self._events.get() for _ in range(self._events.qsize())]  # only this thread gets events

    def wait_until_done(self, deadline: float = math.inf) -> Iterator[None]:
        """Waits until the queue is empty or the monotonic clock reaches `deadline`. Yields often, so that the ranks
        that wait for this one do not time out."""
        last_message_time = time.monotonic()
        while self._thread.is_alive() and self._has_work() and time.monotonic() < deadline:
            if time.monotonic() - last_message_time > PROGRESS_SECONDS:
                last_message_time = time.monotonic()
                print_line(f"waiting until the last checkpoint is in {self._remote.url}")
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
        """Uploads a checkpoint; returns True if that succeeded, or if the checkpoint was removed from the disk."""
        start_time, folder, step = time.monotonic(), upload.folder, step_of(upload.folder)

        def action() -> None:
            try:
                sent = upload_checkpoint(self._remote, folder, self._lease.check, is_new=upload.is_new)
            except Exception:
                if not _is_gone(folder):
                    raise
            else:
                seconds = round(time.monotonic() - start_time, 3)
                self._events.put(Event({"step": step, "seconds": seconds, "bytes": sent}))

        return self._attempt(action, {"step": step}, f"step {step:,} is not in the remote store, only in {folder}")

    def _send_files(self, upload: Upload | None) -> None:
        """Removes checkpoints that `upload` supersedes, then uploads the run's small files."""
        with self._condition:
            self._files_changed = False  # later changes are uploaded again

        def action() -> None:
            if upload is not None:
                remove_superseded(self._remote, upload.folder.name, self._rules)
            self._put(self._folder.metrics, self._folder.session_end)

        self._attempt(action, {}, "the run's log is not in the remote store")

    def _attempt(self, action: Callable[[], None], fields: dict[str, Any], failure: str) -> bool:
        """Runs `action`, with retries unless a newer checkpoint is queued; returns whether it succeeded. Otherwise adds
        an event with the message `failure`."""
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
        if self._lease.acquire():  # newly taken: the store may be empty
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
