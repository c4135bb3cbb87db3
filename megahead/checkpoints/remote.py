"""Checkpoints of a run in an object store: the storage, its owner, and the lease of the session that writes."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from megahead.background import submit
from megahead.checkpoints.disk import DiskStorage, step_folders
from megahead.checkpoints.format import MANIFEST, FileEntry, Manifest
from megahead.checkpoints.store import (
    Ancestry,
    Latest,
    Storage,
    highest_first,
    history,
    is_ancestor,
    is_checkpoint_name,
    manifest_if_valid,
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
    """The checkpoints in a folder of a store. RemoteError where it cannot be read or written."""

    store: Store
    root: str = CHECKPOINTS
    """The folder; empty: all of the store."""

    @staticmethod
    def of(url: str, timeout: float = TIMEOUT_SECONDS) -> RemoteStorage:
        """Those of the run at `url`."""
        return RemoteStorage(Store(url, timeout))

    @property
    def url(self) -> str:
        """Of the store."""
        return self.store.url

    def path(self, *names: str) -> str:
        """A file's name in the store."""
        return "/".join(filter(None, (self.root, *names)))

    def names(self) -> list[str]:
        return [name for name, files in self._list_files().items() if MANIFEST in files]

    def manifest(self, name: str) -> Manifest:
        return self.manifest_with_text(name)[1]

    def manifest_with_text(self, name: str) -> tuple[bytes, Manifest]:
        """The manifest's bytes and content; CheckpointError if it is damaged or missing."""
        text = self.store.read_if_exists(self.path(name, MANIFEST))
        if text is None:
            raise CheckpointError(
                f"`{join_url(self.url, self.path(name))}` must stay while it is read, but was removed."
            )
        return text, Manifest.parse(text, join_url(self.url, self.path(name, MANIFEST)))

    @property
    def latest(self) -> Latest:
        """See `Storage`. Also a whole checkpoint that continues what was put there last: its upload was killed right
        before it would have been."""
        latest = Latest.read((self.store.read_if_exists(self.path("latest")) or b"").decode(errors="replace"))
        return latest if latest.name is None else self._find_continuation(latest, latest.name)

    def _find_continuation(self, latest: Latest, latest_name: str) -> Latest:
        for name in highest_first(self.names()):
            if step_of(name) <= step_of(latest_name):
                break
            manifest = manifest_if_valid(self, name)
            if manifest is not None and is_ancestor(latest_name, manifest.parents or (name,)):
                return Latest(name, manifest.parents)
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
        """Sends the checkpoint in `folder`, as far as it is not there; returns the bytes sent. RemoteError or
        DamagedError if the store fails or has not kept what it was sent: then the checkpoint does not count there.

        Calls `refuse` before each file; it raises an error if this session may not write there any more.
        """
        name, text = folder.name, (folder / MANIFEST).read_bytes()
        files, stored = Manifest.parse(text, str(folder / MANIFEST)).files, self._list_files().get(name, {})
        if MANIFEST not in stored or self.store.read_if_exists(self.path(name, MANIFEST)) != text:
            stored = {}
        missing = {file: entry for file, entry in files.items() if stored.get(file) != entry.bytes}
        self._send(folder, missing, check_lease)
        stored = self._list_files().get(name, {})
        for file, entry in files.items():
            if stored.get(file) != entry.bytes:  # somebody emptied the store meanwhile
                url = join_url(self.url, self.path(name, file))
                raise DamagedError(f"`{url}` must stay while its checkpoint is sent, but is gone.")
        check_lease()
        try:
            self.store.write(self.path(name, MANIFEST), text)
        except BaseException:
            with suppress(UserError):  # half of it would count as a damaged checkpoint
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
                for _ in download(self.store, target, ExpectedFile(entry.bytes, entry.sha256), len):
                    pass

        futures = [submit(upload_files) for _ in range(PARALLEL_TRANSFERS)]
        wait(futures)  # all have ended before one raises
        for future in futures:
            future.result()

    def _list_files(self) -> dict[str, dict[str, int]]:
        """The files and their sizes by checkpoint folder, complete or not."""
        files_by_name: dict[str, dict[str, int]] = {}
        for path, size in self.store.sizes(self.root).items():
            folder, _, file = path.removeprefix(f"{self.root}/" if self.root else "").partition("/")
            if is_checkpoint_name(folder) and not folder.endswith(".replaced") and "/" not in file:
                files_by_name.setdefault(folder, {})[file] = size
        return files_by_name


def find_remote(url: str, timeout: float = TIMEOUT_SECONDS) -> tuple[RemoteStorage, list[str]]:
    """What a URL means: the place, and which checkpoints there, best first: a run's history, that of a folder of
    checkpoints, one of them, or those of one step in the history (.../checkpoints/step-N without digits)."""
    store = Store(url, timeout)
    sizes = store.sizes("")
    folder, name = split_url(store.url)
    step_match = re.fullmatch(r"(?:step-)?0*(\d+)", name)
    if MANIFEST in sizes or (step_match and not sizes):
        parent = RemoteStorage(Store(folder, timeout), root="")
        if MANIFEST in sizes:
            return parent, [name]
        return parent, [name for name in history(parent) if step_match and step_of(name) == int(step_match[1])]
    remote = RemoteStorage(store, CHECKPOINTS if any(path.startswith(f"{CHECKPOINTS}/") for path in sizes) else "")
    return remote, history(remote)


def retry_seconds(group: Group) -> float:
    """Seconds for one request while the other ranks of a group wait for the next few of them."""
    return min(TIMEOUT_SECONDS, group.timeout_seconds / 8)


def newer_names(remote: RemoteStorage, folder: RunFolder, newer_than: int) -> list[str]:
    """Those of the remote's history that the run in `folder` would rather go on from than from step `than`, best first:
    newer ones; or all that it does not have, if the remote's newest went back from what led to its own. None that it
    went back from itself."""
    names, ancestry = history(remote), read_ancestry(folder)
    newest = manifest_if_valid(remote, names[0]) if names else None
    rolled_back = newest is not None and not {*ancestry.parents}.isdisjoint(newest.orphaned)

    def is_fresh(name: str) -> bool:
        is_newer = step_of(name) > newer_than or (rolled_back and not is_ancestor(name, ancestry.parents))
        return is_newer and name not in ancestry.orphaned

    return list(takewhile(is_fresh, names))


def read_ancestry(folder: RunFolder) -> Ancestry:
    """That of the run's newest checkpoint on disk whose manifest can be read."""
    disk = DiskStorage(folder.checkpoints)
    for name in history(disk):
        manifest = manifest_if_valid(disk, name)
        if manifest is not None:
            return Ancestry.of(name, manifest)
    return Ancestry()


# Whose it is: one run's, and at any time one session's.
#
# `run-id`, the same in the run's folder and in the store, keeps two runs from removing each other's checkpoints. The
# lease, in `session`, says which of two processes that were cut off from each other may write. A session takes it over
# from whoever had it when the session looked at the store; who finds it taken by a third one ends.


class LeaseLostError(UserError):
    """Another session, or another run, writes the remote checkpoints now."""


ID, SESSION = "run-id", "session"


@dataclass(frozen=True)
class RemoteState:
    """The content of a store when a session started."""

    run_id: bytes | None = None
    lease: bytes | None = None
    names: tuple[str, ...] = ()
    """Of its checkpoints."""


def read_state(remote: RemoteStorage, folder: RunFolder, resume: str) -> RemoteState:
    """What is in the store before a session begins; CheckpointError if it belongs to another run than that in `folder`,
    which `resume` would go on with, or is that folder; RemoteError if what is written there cannot be read back."""
    _try_writing(remote.store, folder)
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


def _try_writing(store: Store, folder: RunFolder) -> None:
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
        """`session_id`: that in the run's folder."""
        self._store, self._folder, self._session_id, self._remote_state = store, folder, session_id.encode(), state
        self._is_taken = self._is_complete = False

    def acquire(self) -> bool:
        """Takes the lease, again if somebody has emptied the store, and returns whether it did; LeaseLostError if the
        store has become another's."""
        must_take = not self._is_complete or (
            _read_nonempty(self._store, SESSION) is None and _read_nonempty(self._store, ID) is None
        )
        if must_take:
            self._is_complete = False
            self.check()
            self._write_lease()
        self.check()
        self._is_complete = True
        return must_take

    def check(self) -> None:
        """LeaseLostError if another session has taken the lease since this one did, or since it looked."""
        remote_value = _read_nonempty(self._store, SESSION)
        if remote_value not in (None, self._session_id) and (
            self._is_taken or remote_value != self._remote_state.lease
        ):
            raise LeaseLostError(
                f"training.remote_checkpoints must have one session at a time, but with {self._store.url} another has "
                f"begun on {str(remote_value, errors='replace').strip()}; this one ends, and what it has not saved is "
                "the other's to do again."
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
