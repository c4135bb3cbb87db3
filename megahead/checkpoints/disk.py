"""Checkpoints in a run's folder: saving, names, retention."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from megahead.checkpoints.folders import (
    KEEP_NO_OTHERS,
    FileEntry,
    KeepRules,
    Manifest,
    TensorEntry,
    abandon_after,
    check_lengths,
    clear_remains,
    partial_folder,
    publish,
    retain,
    step_folder,
)
from megahead.checkpoints.format import Snapshot, run_on_all_ranks
from megahead.distributed.group import Group
from megahead.distributed.tensors import RoundRobinShard
from megahead.errors import CheckpointError
from megahead.files import is_full


def save_checkpoint(
    root: Path,
    step: int,
    tensors: Iterable[tuple[str, Tensor | RoundRobinShard]],
    *,
    state: dict[str, Any],
    config: dict[str, Any],
    group: Group,
    keep: int,
    keep_rules: KeepRules = KEEP_NO_OTHERS,
    parent_step: int | None = None,
) -> Path:
    """Saves full named tensors as `root`/step-NNNNNNNN and keeps the `keep` newest checkpoints. Collective.

    Every rank iterates over the same names in the same order and holds only its share (about 1 / `group.size` of
    all bytes) until it is written. An existing folder of this step is replaced. `parent_step`: the step of the
    checkpoint in `root` that this one continues, -1 for none, None for `step`; all others above it are set aside. If a
    rank fails, all raise the same CheckpointError; old checkpoints stay intact and nothing half-written is left.
    """
    snapshot = Snapshot.take(tensors, group)
    return write_snapshot(
        root,
        step,
        snapshot,
        state=state,
        config=config,
        group=group,
        keep=keep,
        keep_rules=keep_rules,
        parent_step=parent_step,
    )


def write_snapshot(
    root: Path,
    step: int,
    snapshot: Snapshot,
    *,
    state: dict[str, Any],
    config: dict[str, Any],
    group: Group,
    keep: int,
    keep_rules: KeepRules = KEEP_NO_OTHERS,
    parent_step: int | None = None,
) -> Path:
    """The second half of `save_checkpoint`. It uses nothing but the snapshot, so it may run in another thread with a
    `group` of its own."""
    return write_together(
        root,
        step,
        lambda folder: {snapshot.file: snapshot.write(folder)},
        total_bytes=snapshot.total_bytes,
        tensors=snapshot.entries,
        state=state,
        config=config,
        group=group,
        keep=keep,
        keep_rules=keep_rules,
        parent_step=parent_step,
    )


def write_together(
    root: Path,
    step: int,
    write: Callable[[Path], dict[str, FileEntry]],
    *,
    total_bytes: int,
    tensors: dict[str, TensorEntry],
    state: dict[str, Any],
    config: dict[str, Any],
    group: Group,
    keep: int,
    keep_rules: KeepRules = KEEP_NO_OTHERS,
    parent_step: int | None = None,
) -> Path:
    """A checkpoint of `total_bytes`, whose `tensors` are in files that `write` puts into a folder: on each rank some of
    them. Otherwise as `save_checkpoint`."""
    partial, final = partial_folder(root, step), step_folder(root, step)

    def describe_error(error: Exception) -> str:
        return _sentence(error, partial, total_bytes)

    def finish() -> None:
        if group.rank == 0:
            manifest.write(partial)
            check_lengths(partial, manifest)  # checks too that this rank sees what the others wrote
            abandon_after(final, step if parent_step is None else min(parent_step, step))
            publish(partial, final)
            retain(root, final, keep, keep_rules)

    try:
        run_on_all_ranks(group, lambda: _prepare(partial, total_bytes) if group.rank == 0 else None, describe_error)
        written = run_on_all_ranks(group, lambda: write(partial), describe_error)
        files = {name: entry for part in written for name, entry in part.items()}
        manifest = Manifest(step=step, state=state, config=config, tensors=tensors, files=files)
        run_on_all_ranks(group, finish, describe_error)
    except CheckpointError:
        if group.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return final


def _prepare(partial: Path, needed: int) -> None:
    root = partial.parent
    root.mkdir(parents=True, exist_ok=True)
    clear_remains(root)
    if shutil.disk_usage(root).free < needed:
        raise OSError(errno.ENOSPC, "no room", str(root))
    partial.mkdir()


def _sentence(error: Exception, partial: Path, needed: int) -> str:
    root = partial.parent
    if isinstance(error, CheckpointError):
        return str(error)
    if not _is_full(error):
        return f"`{root}` must take a checkpoint, but cannot ({error}); older checkpoints are unharmed."
    there = shutil.disk_usage(root).free + sum(map(_length, partial.glob("*")))
    lack = f"{needed - there} bytes are missing" if needed > there else "its disk or quota is full"
    return (
        f"`{root}` must have room for a checkpoint of {needed} bytes, but {lack}; free some or lower "
        "training.keep_checkpoints (older checkpoints are unharmed)."
    )


def _length(file: Path) -> int:
    """Bytes of a file, 0 if another rank has renamed it since it was listed."""
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def _is_full(error: Exception) -> bool:
    """Whether the disk is full, which safetensors says as a text."""
    return is_full(error) or (isinstance(error, SafetensorError) and f"os error {errno.ENOSPC}" in str(error))
