"""Checkpoints of a run in an object store: the storage, its run id, and the lease of the writing session."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megahead.background import submit
from megahead.checkpoints.disk import DiskStorage, step_folders
from megahead.checkpoints.format import MANIFEST, FileEntry, Manifest
from megahead.checkpoints.store import (
    Ancestry,
    Latest,
    Storage,
    highest_step_first,
    is_ancestor,
    is_checkpoint_name,
    step_of,
)
from megahead.distributed.group import Group
from megahead.errors import CheckpointError, UserError
from megahead.files import read_if_exists, write_atomically
from megahead.remote_files import (
    TIMEOUT_SECONDS,
    DamagedError,
    ExpectedFile,
    Store,
    download,
    is_below,
    join_url,
    split_url,
)
from megahead.run_folder import RunFolder

# The storage. Object stores cannot rename: a checkpoint is complete once its manifest, uploaded last, exists.


CHECKPOINTS = "checkpoints"

PARALLEL_TRANSFERS = 4
"""Files uploaded concurrently."""


@dataclass(frozen=True)
class RemoteStorage(Storage):
    """The checkpoints in a folder of a store. RemoteError if it cannot be read or written."""

    store: Store
    root: str = CHECKPOINTS
    """The folder; empty for the root of the store."""

    @staticmethod
    def of(url: str, timeout: float = TIMEOUT_SECONDS) -> RemoteStorage:
        """The checkpoints of the run at `url`."""
        return RemoteStorage(Store(url, timeout))

    @property
    def url(self) -> str:
        """The URL of the store."""
        return self.store.url

    def path(self, *names: str) -> str:
        """The path of a file in the store."""
        return "/".join(filter(None, (self.root, *names)))

    def names(self) -> list[str]:
        return [name for name, files in self._list_files().items() if MANIFEST in files]

    def manifest(self, name: str) -> Manifest:
        return self.manifest_with_bytes(name)[1]

    def manifest_with_bytes(self, name: str) -> tuple[bytes, Manifest]:
        """The manifest's bytes and content; CheckpointError if it is damaged or missing."""
        content = self.store.read_if_exists(self.path(name, MANIFEST))
        if content is None:
            raise CheckpointError(
                f"`{join_url(self.url, self.path(name))}` must stay while it is read, but was removed."
            )
        return content, Manifest.parse(content, join_url(self.url, self.path(name, MANIFEST)))

    @property
    def latest(self) -> Latest:
        """As in `Storage`; or a later complete checkpoint that continues it, if the process was killed before it wrote
        `latest`."""
        latest = Latest.read((self.store.read_if_exists(self.path("latest")) or b"").decode(errors="replace"))
        return latest if latest.name is None else self._find_continuation(latest, latest.name)

    def _find_continuation(self, latest: Latest, latest_name: str) -> Latest:
        for name in highest_step_first(self.names()):
            if step_of(name) <= step_of(latest_name):
                break
            manifest = self.manifest_if_valid(name)
            # checkpoints of earlier versions list no ancestors, and are compared by step
            if manifest is not None and is_ancestor(latest_name, manifest.ancestors or (name,)):
                return Latest(name, manifest.ancestors)
        return latest

    def write_latest(self, latest: Latest) -> None:
        self.store.write(self.path("latest"), latest.text().encode())

    def remove(self, name: str) -> None:
        files = self._list_files().get(name, {})
        for file in sorted(files, key=lambda file: file != MANIFEST):
            self.store.remove(self.path(name, file))
        self.store.remove_folder(self.path(name))

    def remove_partial(self, excluded: str) -> None:
        """Removes incomplete uploads, except for the checkpoint `excluded`."""
        for name, files in self._list_files().items():
            if MANIFEST not in files and name != excluded:
                self.remove(name)

    def put(self, folder: Path, check_lease: Callable[[], None]) -> int:
        """Uploads the missing files of the checkpoint in `folder`, the manifest last; returns the bytes sent.
        RemoteError or DamagedError, without a remote manifest, if the store fails or loses a file.

        `check_lease`, called before each file, raises if the session has lost its lease.
        """
        name, manifest = folder.name, (folder / MANIFEST).read_bytes()
        files, stored = Manifest.parse(manifest, str(folder / MANIFEST)).files, self._list_files().get(name, {})
        if MANIFEST not in stored or self.store.read_if_exists(self.path(name, MANIFEST)) != manifest:
            stored = {}
        missing = {file: entry for file, entry in files.items() if stored.get(file) != entry.bytes}
        self._send(folder, missing, check_lease)
        stored = self._list_files().get(name, {})
        for file, entry in files.items():
            if stored.get(file) != entry.bytes:  # somebody emptied the store during the upload
                url = join_url(self.url, self.path(name, file))
                raise DamagedError(f"`{url}` must stay while its checkpoint is sent, but is gone.")
        check_lease()
        try:
            self.store.write(self.path(name, MANIFEST), manifest)
        except BaseException:
            with suppress(UserError):  # a partial one would count as a damaged checkpoint
                self.store.remove(self.path(name, MANIFEST))
            raise
        return sum(entry.bytes for entry in missing.values())

    def _send(self, folder: Path, files: dict[str, FileEntry], check_lease: Callable[[], None]) -> None:
        """Uploads files and verifies each by reading it back, since a store may lose acknowledged writes."""
        queue = iter(sorted(files.items(), key=lambda item: item[1].bytes, reverse=True))

        def upload_files() -> None:
            for file, entry in queue:  # shared by the threads
                check_lease()
                target = self.path(folder.name, file)
                self.store.put(folder / file, target)
                # `len` drops the bytes, which are only verified
                for _ in download(self.store, target, ExpectedFile(entry.bytes, entry.sha256), len):
                    pass

        futures = [submit(upload_files) for _ in range(PARALLEL_TRANSFERS)]
        wait(futures)  # all end, even if one fails
        for future in futures:
            future.result()

    def _list_files(self) -> dict[str, dict[str, int]]:
        """{checkpoint folder: {file: bytes}}, incomplete checkpoints included."""
        files_by_name: dict[str, dict[str, int]] = {}
        for path, size in self.store.sizes(self.root).items():
            folder, _, file = path.removeprefix(f"{self.root}/" if self.root else "").partition("/")
            # `.replaced`: left by earlier versions that were killed while they replaced a checkpoint
            if is_checkpoint_name(folder) and not folder.endswith(".replaced") and "/" not in file:
                files_by_name.setdefault(folder, {})[file] = size
        return files_by_name


def find_remote(url: str, timeout: float = TIMEOUT_SECONDS) -> tuple[RemoteStorage, list[str]]:
    """The storage and the checkpoints at a URL, in the order to try them: the newest and its ancestors, or those of
    one step. The URL is that of a run or checkpoints folder, of one step (.../checkpoints/step-N without random
    digits), or of one checkpoint."""
    store = Store(url, timeout)
    sizes = store.sizes("")
    folder, name = split_url(store.url)
    step_match = re.fullmatch(r"(?:step-)?0*(\d+)", name)
    if MANIFEST in sizes or (step_match and not sizes):
        parent = RemoteStorage(Store(folder, timeout), root="")
        if MANIFEST in sizes:
            return parent, [name]
        return parent, [name for name in parent.history() if step_match and step_of(name) == int(step_match[1])]
    remote = RemoteStorage(store, CHECKPOINTS if any(path.startswith(f"{CHECKPOINTS}/") for path in sizes) else "")
    return remote, remote.history()


def retry_seconds(group: Group) -> float:
    """Seconds to retry a request: the other ranks of `group` wait meanwhile, and must not time out after several
    requests."""
    return min(TIMEOUT_SECONDS, group.timeout_seconds / 8)


def newer_names(remote: RemoteStorage, folder: RunFolder, newer_than: int) -> list[str]:
    """The remote checkpoints from which the run in `folder` should resume rather than from step `newer_than`, in the
    order to try them: those with a higher step. If the remote run has rolled back past the newest on disk or an
    ancestor of it, also those with a lower step that are not among these. Never one that the run in `folder` itself
    rolled back past (`orphaned`)."""
    names, ancestry = remote.history(), read_ancestry(folder)
    newest = remote.manifest_if_valid(names[0]) if names else None
    rolled_back = newest is not None and not {*ancestry.ancestors}.isdisjoint(newest.orphaned)

    def is_preferred(name: str) -> bool:
        is_newer = step_of(name) > newer_than or (rolled_back and not is_ancestor(name, ancestry.ancestors))
        return is_newer and name not in ancestry.orphaned

    return list(filter(is_preferred, names))


def read_ancestry(folder: RunFolder) -> Ancestry:
    """The ancestry of the run's newest checkpoint on disk with a readable manifest."""
    disk = DiskStorage(folder.checkpoints)
    for name in disk.history():
        manifest = disk.manifest_if_valid(name)
        if manifest is not None:
            return Ancestry.of(name, manifest)
    return Ancestry()


# Ownership of a store: one run, and one session at a time.
#
# `run-id`, the same in the run's folder and in the store, keeps two runs from removing each other's checkpoints. The
# lease, in `session`, is the id of the session that may write. A session takes over the lease that it found when it
# started; it ends if another session has taken the lease since.


class LeaseLostError(UserError):
    """Another session or run has taken over the store."""


ID, SESSION = "run-id", "session"


@dataclass(frozen=True)
class RemoteState:
    """The content of a store when a session started."""

    run_id: bytes | None = None
    lease: bytes | None = None
    names: tuple[str, ...] = ()
    """The names of its checkpoints."""


def read_state(remote: RemoteStorage, folder: RunFolder, resume: str) -> RemoteState:
    """The content of the store when a session starts. CheckpointError if it is `folder` itself, or belongs neither to
    the run in `folder` nor to the one that `resume` continues; RemoteError if it cannot be written and read."""
    _check_writable(remote.store, folder)
    remote_id, local_id = _read_nonempty(remote.store, ID), read_if_exists(folder.run_id)
    names = remote.names()
    newest_name = f"{CHECKPOINTS}/{max(names, key=step_of)}" if names else ""
    if resume == "never" and newest_name:
        raise CheckpointError(
            f"`--resume never` needs a remote store without checkpoints, but {remote.url} has {newest_name}; choose "
            "another training.remote_checkpoints."
        )
    may_adopt = not step_folders(folder.checkpoints) and (resume in ("auto", "never") or is_below(resume, remote.url))
    if remote_id is None and newest_name and not may_adopt:
        raise CheckpointError(
            f"`training.remote_checkpoints` must be this run's or empty, but {remote.url} has {newest_name}, and no "
            f"{ID}; choose another."
        )
    if remote_id is not None and remote_id != local_id and not (local_id is None and may_adopt):
        raise CheckpointError(
            f"`training.remote_checkpoints` must be this run's or empty, but {remote.url} is that of another; choose "
            f"another, or copy its {ID} into {folder} if it is this run's after all."
        )
    return RemoteState(remote_id, _read_nonempty(remote.store, SESSION), tuple(names))


def _read_nonempty(store: Store, name: str) -> bytes | None:
    """A small file; None if it is missing, or empty after a full disk."""
    return store.read_if_exists(name) or None


def _check_writable(store: Store, folder: RunFolder) -> None:
    name, token = f".tried-{secrets.token_hex(8)}", secrets.token_bytes(16)
    store.write(name, token)
    is_same_folder = (folder / name).exists()
    store.remove(name)
    if is_same_folder:
        raise CheckpointError(
            f"`training.remote_checkpoints` must be another place than output_dir, but {store.url} is {folder}; "
            "choose another."
        )


class RemoteLease:
    """A session's exclusive right to write to a store."""

    def __init__(self, store: Store, folder: RunFolder, session_id: str, state: RemoteState) -> None:
        """`session_id`: as in the run's folder."""
        self._store, self._folder, self._session_id, self._remote_state = store, folder, session_id.encode(), state
        self._is_taken = False  # whether this session has ever written the lease
        self._is_written = False  # whether the last `acquire` succeeded

    def acquire(self) -> bool:
        """Takes the lease if this session does not have it, or if the store was emptied; returns whether it did.
        LeaseLostError if another run or session has the store."""
        must_take = not self._is_written or (
            _read_nonempty(self._store, SESSION) is None and _read_nonempty(self._store, ID) is None
        )
        if must_take:
            self._is_written = False
            self.check()
            self._write_lease()
        self.check()
        self._is_written = True
        return must_take

    def check(self) -> None:
        """LeaseLostError if another session has taken the lease since this one did, or since `state` was read."""
        remote_value = _read_nonempty(self._store, SESSION)
        if remote_value not in (None, self._session_id) and (
            self._is_taken or remote_value != self._remote_state.lease
        ):
            raise LeaseLostError(
                f"training.remote_checkpoints must have one session at a time, but with {self._store.url} another has "
                f"begun on {str(remote_value, errors='replace').strip()}; this one ends, and the "
                "other repeats what it has not saved."
            )

    def _write_lease(self) -> None:
        remote_value, local_id = _read_nonempty(self._store, ID), read_if_exists(self._folder.run_id)
        if remote_value is not None and remote_value != (self._remote_state.run_id if local_id is None else local_id):
            raise LeaseLostError(
                f"training.remote_checkpoints must be this run's, but {self._store.url} has become that of another; "
                "choose another."
            )
        identity = remote_value or local_id or f"{secrets.token_hex(16)}\n".encode()
        if local_id is None:
            write_atomically(self._folder.run_id, identity)
        if remote_value is None:
            self._store.write(ID, identity)
        self._store.write(SESSION, self._session_id)
        self._is_taken = True
