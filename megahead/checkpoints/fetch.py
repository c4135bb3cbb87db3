"""Fetches checkpoints from an object store, verified, into a run's folder or this machine's cache."""

from __future__ import annotations

import fcntl
import re
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megahead.checkpoints.disk import DiskStorage, Source, copy_newest_valid, is_complete
from megahead.checkpoints.format import MANIFEST, Manifest, check_files, run_on_first_rank
from megahead.checkpoints.reading import Checkpoint, RecoveryResult, open_verified
from megahead.checkpoints.remote import (
    CHECKPOINTS,
    RemoteStorage,
    find_remote,
    newer_names,
    read_ancestry,
    retry_seconds,
)
from megahead.checkpoints.store import Latest, is_checkpoint_name, new_checkpoint_name, step_of
from megahead.distributed.group import Group
from megahead.errors import CheckpointError
from megahead.files import fsync, write_atomically
from megahead.remote_files import DamagedError, ExpectedFile, Store, cache_folder, download, join_url, with_progress
from megahead.run_folder import RunFolder

# Fetching the checkpoint that a session resumes from, on all ranks.


SINGLE_RANK = Group()


def fetch_newer(
    newer_than: int, url: str, folder: RunFolder, group: Group, validate: Callable[[Checkpoint], None]
) -> RecoveryResult | None:
    """Fetches the newest valid checkpoint at `url` into `folder`, with its log and run id, if it is newer than step
    `newer_than` (see `newer_names`); otherwise returns None. Collective; CheckpointError if the store cannot be read.

    `validate` may raise on rank 0 before the download.
    """
    start_time, disk = time.monotonic(), DiskStorage(folder.checkpoints)

    def find_newer() -> tuple[RemoteStorage, list[str]]:
        remote = RemoteStorage.of(url, retry_seconds(group))
        return remote, newer_names(remote, folder, newer_than)

    def files() -> dict[Path, bytes]:
        return read_small_files(url, group, folder.metrics, folder.run_id)

    name, damage = copy_newest_valid(_Fetch(find_newer, disk, group, validate, files), disk, group)
    if name is None:
        return RecoveryResult("mirror", None, damage) if damage else None
    run_on_first_rank(group, lambda: disk.write_latest(Latest(name, disk.manifest(name).parents)))
    checkpoint, seconds = open_verified(disk.root / name, group), time.monotonic() - start_time
    message = f"step {checkpoint.step:,} from {url} in {seconds:.1f} s"
    details = {"fetched": checkpoint.step, "seconds": round(seconds, 3)}
    return RecoveryResult("mirror", checkpoint, damage, message, details)


def read_small_files(url: str, group: Group, *paths: Path) -> dict[Path, bytes]:
    """The contents of small files of the run at `url`, for those that exist."""
    store = Store(url, retry_seconds(group))
    content_by_path = {path: store.read_if_exists(path.name) for path in paths}
    return {path: content for path, content in content_by_path.items() if content is not None}


def fetch_checkpoint(
    url: str,
    into: RunFolder,
    group: Group = SINGLE_RANK,
    validate: Callable[[Checkpoint], None] = lambda _: None,
    files: Callable[[], dict[Path, bytes]] = dict,
) -> Path:
    """Fetches the newest valid checkpoint at a URL (see `find_remote`) into `into`, unless it is there already, and
    returns its folder. Skips those that the run in `into` has orphaned, reports damaged ones, and leaves `latest`
    unchanged. `validate` may raise before the download; `files` are the contents of small files to write with it.
    Collective; CheckpointError if there is none."""

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
        print(f"passed over: {problem}", file=sys.stderr, flush=True)
    return disk.root / name


@dataclass
class _Fetch(Source):
    """The remote checkpoints that `find` returns, best first; rank 0 fetches them.

    `find` is called again after each damaged one: a running session may have replaced it by a newer one. `files` are
    read before the download, so that their errors come early, and written before the checkpoint has its name, after
    which it would not be fetched again.
    """

    find: Callable[[], tuple[RemoteStorage, list[str]]]
    disk: DiskStorage
    group: Group
    validate: Callable[[Checkpoint], None]
    files: Callable[[], dict[Path, bytes]]
    tried: list[str] = field(default_factory=list)

    def select_next(self) -> Generator[None, None, tuple[str | None, int]]:
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
        self.contents, local_name = self.files(), self._local_name(name)
        if is_complete(self.disk.root / local_name):
            with suppress(CheckpointError):
                yield from check_files(self.disk.root / local_name, self.manifest.files)
                _write_files(self.contents)
                return local_name, 0
        return local_name, self.manifest.total_bytes

    def _local_name(self, name: str) -> str:
        """The name of the same checkpoint on disk, else `name`, or a new one if another checkpoint has it (an earlier
        version could reuse names)."""
        for candidate in self.disk.names():
            folder = self.disk.root / candidate
            is_same_step = step_of(candidate) == self.manifest.step
            if is_same_step and is_complete(folder) and (folder / MANIFEST).read_bytes() == self.manifest_bytes:
                return candidate
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
            for received in download(remote.store, remote.path(name, file), expected, target.write):
                yield previous_bytes + received
        fsync(partial_folder / file)
        previous_bytes += entry.bytes


# Remote checkpoints in this machine's cache, for commands.


def fetch_to_cache(url: str) -> Path:
    """Fetches the newest valid checkpoint at a URL into this machine's cache, with the run's tokenizer and log."""
    run = RunFolder(cache_folder(url))
    with _locked(run):
        folder = fetch_checkpoint(url, run)
        paths = run.tokenizer_json, run.tokenizer_model, run.source_hf_files, run.metrics
        _write_files(read_small_files(_run_url(url), SINGLE_RANK, *paths))
    return folder


def _run_url(url: str) -> str:
    """The URL of the run, from that of the run, its checkpoints folder or one checkpoint."""
    return re.sub(rf"/{CHECKPOINTS}(/(step-)?\d+(-[0-9a-f]+)?)?/*$", "", url)


@contextmanager
def _locked(run: RunFolder) -> Iterator[None]:
    """Excludes other processes of this machine, which would remove the partial checkpoint in the same folder."""
    run.path.mkdir(parents=True, exist_ok=True)
    with (run / "turn").open("w") as file:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
