"""Checkpoints in a run's folder: collective saving, lookup, retention.

    step-00001000-3f2a91/           a complete checkpoint, renamed from the partial one
    latest                          text: the newest checkpoint's name, then those of its ancestors; written last
    .step-00001000-3f2a91.partial   being written or removed; left by a crash, it is useless

Earlier versions wrote `step-00001000`, renamed it to `step-00001000.replaced` while they replaced it, and renamed
orphaned ones to `abandoned-step-00001000`, found only under this name.
"""

from __future__ import annotations

import errno
import re
import shutil
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError
from torch import Tensor

from megahead.checkpoints.format import (
    MANIFEST,
    FileEntry,
    Header,
    Manifest,
    Snapshot,
    check_lengths,
    run_generator_on_all_ranks,
    run_on_first_rank,
)
from megahead.checkpoints.store import Latest, RetentionRules, Storage, is_checkpoint_name, new_checkpoint_name, step_of
from megahead.distributed.group import Group
from megahead.errors import CheckpointError, UserError
from megahead.files import VISIBLE_SECONDS, is_full, publish_folder, wait_until_visible, write_atomically
from megahead.remote_files import DamagedError
from megahead.run_folder import RunFolder
from megahead.wording import print_line


@dataclass(frozen=True)
class DiskStorage(Storage):
    """The checkpoints in `root`, which need not exist."""

    root: Path

    @staticmethod
    def of(path: Path) -> DiskStorage:
        """The checkpoints of a run folder, or of a checkpoints folder."""
        checkpoints = RunFolder(path).checkpoints
        return DiskStorage(checkpoints if checkpoints.is_dir() else path)

    def names(self) -> list[str]:
        return [folder.name for folder in self.root.glob("step-*") if is_checkpoint_name(folder.name)]

    def manifest(self, name: str) -> Manifest:
        return Manifest.read(self.root / name)

    @property
    def latest(self) -> Latest:
        try:
            return Latest.read((self.root / "latest").read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError):
            return Latest()

    def write_latest(self, latest: Latest) -> None:
        write_atomically(self.root / "latest", latest.text())

    def remove(self, name: str) -> None:
        """Removes a checkpoint; renames it first, so that no partial folder has its name. Files that
        another process reads stay on NFS until the next save removes them."""
        partial_folder = self.partial_folder(name)
        (self.root / name).rename(partial_folder)
        shutil.rmtree(partial_folder, ignore_errors=True)

    def partial_folder(self, name: str) -> Path:
        """The folder of an incomplete checkpoint."""
        return self.root / f".{name}.partial"

    def prepare(self, name: str, num_bytes: int) -> Path:
        """Creates the partial folder; OSError if less than `num_bytes` are free (see `describe_write_error`)."""
        self.root.mkdir(parents=True, exist_ok=True)
        self.remove_partial()
        if shutil.disk_usage(self.root).free < num_bytes:
            raise OSError(errno.ENOSPC, "no room", str(self.root))
        self.partial_folder(name).mkdir()
        return self.partial_folder(name)

    def publish(self, name: str) -> Path:
        """Renames a complete folder to `name`, replacing a damaged one."""
        publish_folder(self.partial_folder(name), self.root / name)
        return self.root / name

    def remove_partial(self) -> None:
        """Removes partial files and folders of a crashed save."""
        for folder in self.root.glob(".step-*.partial"):
            shutil.rmtree(folder, ignore_errors=True)
        for file in self.root.glob("latest.*.partial"):
            file.unlink()
        for folder in self.root.glob("step-*.replaced"):
            successor = folder.with_suffix("")
            if is_complete(successor):
                self.remove(folder.name)
            else:
                publish_folder(folder, successor)


def find_checkpoint(path: Path) -> Path | None:
    """Finds a checkpoint; returns None if there is none. `path`: a step folder; a run or checkpoints folder, for its
    newest complete one; CHECKPOINTS/step-N without random digits or CHECKPOINTS/N, for the newest complete one of step
    N.

    Complete means that every file has its full length; contents are verified when they are read.
    """
    if (path / MANIFEST).is_file():
        return path
    step_match = re.fullmatch(r"(?:step-)?0*(\d+)", path.name)
    if step_match and not path.exists():
        folders = [folder for folder in step_folders(path.parent) if step_of(folder) == int(step_match[1])]
    else:
        folders = step_folders(path)
    return next((folder for folder in folders if is_complete(folder)), None)


def step_folders(path: Path) -> list[Path]:
    """The history of a run or checkpoints folder: the newest checkpoint and those of its ancestors that exist, damaged
    included, newest first."""
    disk = DiskStorage.of(path)
    return [disk.root / name for name in disk.history()]


def orphaned_folders(path: Path) -> list[Path]:
    """Checkpoints in a run or checkpoints folder outside of its history, those of earlier versions (`abandoned-step-N`)
    first."""
    disk = DiskStorage.of(path)
    return [*sorted(disk.root.glob("abandoned-step-*")), *(disk.root / name for name in reversed(disk.orphans()))]


def is_complete(folder: Path) -> bool:
    """Whether the folder's manifest is undamaged and its files have the lengths that it records."""
    try:
        check_lengths(folder, Manifest.read(folder))
    except CheckpointError:
        return False
    return True


def save_untrained(root: Path, tensors: Iterable[tuple[str, Tensor]], config: dict[str, Any]) -> Path:
    """Saves full named tensors as a checkpoint of step 0, the first in `root`, from one process."""
    header = Header(new_checkpoint_name(0), 0, {"step": 0, "tokens": 0}, config)
    return write_snapshot(root, header, Snapshot.take(tensors, Group()), Group(), RetentionRules())


def write_snapshot(root: Path, header: Header, snapshot: Snapshot, group: Group, rules: RetentionRules) -> Path:
    """Saves a snapshot as `root`/step-NNNNNNNN-XXXXXX, then removes older checkpoints by `rules`. Collective.

    It may run in another thread, with its own `group`. `header`: the same on all ranks. If a rank fails, all raise the
    same CheckpointError; older checkpoints stay intact and no partial one is left.
    """

    def write(partial_folder: Path) -> Generator[None, None, dict[str, FileEntry]]:
        yield
        return {snapshot.file: snapshot.write(partial_folder)}

    def write_manifest(partial_folder: Path, results: list[dict[str, FileEntry]]) -> None:
        files = {name: entry for part in results for name, entry in part.items()}
        header.manifest(snapshot.entries, files).write(partial_folder)

    return write_collectively(DiskStorage(root), header.name, snapshot.total_bytes, write, write_manifest, group, rules)


def write_collectively(
    disk: DiskStorage,
    name: str,
    num_bytes: int,
    write: Callable[[Path], Iterator[None]],
    write_manifest: Callable[[Path, list[Any]], None],
    group: Group,
    rules: RetentionRules | None = None,
) -> Path:
    """Writes the checkpoint `name` of `num_bytes` bytes. Every rank runs the generator `write`, which writes its files
    and yields often: at a yield the ranks may wait for each other, so that none with fewer files times out. Then rank 0
    writes the manifest, given what `write` returned on each rank. With `rules`, makes the checkpoint `latest` and
    removes older ones by them. Collective; errors as in `write_snapshot`."""
    partial_folder = disk.partial_folder(name)
    describe_error = partial(describe_write_error, partial_folder=partial_folder, num_bytes=num_bytes)

    def write_when_visible() -> Generator[None, None, Any]:
        wait_until_visible(partial_folder, VISIBLE_SECONDS)
        return (yield from write(partial_folder))

    def finish() -> None:
        write_manifest(partial_folder, results)
        manifest = Manifest.read(partial_folder)
        check_lengths(partial_folder, manifest)  # also checks that this rank sees the files of the others
        disk.publish(name)
        if rules is not None:
            disk.write_latest(Latest(name, manifest.ancestors))
            try:
                disk.retain(rules)
            except OSError as error:  # the new checkpoint is complete; the next save tries again
                print_line(f"warning: an older checkpoint cannot be removed ({error}).", sys.stderr)

    try:
        run_on_first_rank(group, lambda: disk.prepare(name, num_bytes), describe_error)
        results = run_generator_on_all_ranks(group, write_when_visible(), describe_error)
        run_on_first_rank(group, finish, describe_error)
    except (UserError, KeyboardInterrupt):
        if group.rank == 0:
            shutil.rmtree(partial_folder, ignore_errors=True)
        raise
    return disk.root / name


class Source(Protocol):
    """Another storage, from which all ranks copy the newest valid checkpoint to disk."""

    def select_next(self) -> Iterator[None]:
        """A generator that returns, on rank 0, the next checkpoint's name on disk (None: none is left) and size in
        bytes (0: it is on disk already). DamagedError if it is damaged."""

    def write(self, partial_folder: Path) -> Iterator[None]:
        """Writes this rank's files of the selected checkpoint; yields often, see `write_collectively`."""

    def write_manifest(self, partial_folder: Path, results: list[Any]) -> None:
        """Writes the manifest of the selected checkpoint."""


def copy_newest_valid(
    source: Source, disk: DiskStorage, group: Group, rules: RetentionRules | None = None
) -> tuple[str | None, list[str]]:
    """Copies the first valid checkpoint of a source to disk; returns its name there, or None, and a sentence for each
    damaged one before it. Collective; CheckpointError if the disk fails or is full."""
    problems = list[str]()
    while True:
        try:
            name, num_bytes = run_generator_on_all_ranks(group, source.select_next())[0]
            if num_bytes:
                write_collectively(disk, name, num_bytes, source.write, source.write_manifest, group, rules)
            return name, problems
        except DamagedError as error:
            problems.append(str(error))


def describe_write_error(error: Exception, partial_folder: Path, num_bytes: int) -> str:
    """The message of an error in writing a checkpoint of `num_bytes` bytes."""
    root = partial_folder.parent
    # safetensors reports a full disk only in its message
    is_disk_full = is_full(error) or (isinstance(error, SafetensorError) and f"os error {errno.ENOSPC}" in str(error))
    if not is_disk_full:  # a full disk's message, below, gives the missing bytes, unlike a WriteError's
        message = f"`{root}` must take a checkpoint, but cannot ({error}); older checkpoints are unharmed."
        return str(error) if isinstance(error, UserError) else message
    available = shutil.disk_usage(root).free + sum(map(_file_size, partial_folder.glob("*")))
    reason = f"{num_bytes - available} bytes are missing" if num_bytes > available else "its disk or quota is full"
    return (
        f"`{root}` must have room for a checkpoint of {num_bytes} bytes, but {reason}; free some or lower "
        "training.keep_checkpoints (older checkpoints are unharmed)."
    )


def _file_size(file: Path) -> int:
    """Bytes of a file, 0 if another rank has renamed it since it was listed."""
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0
