"""Writes a checkpoint so that a reader sees the old one or the new one, even after a crash.

Every rank writes its share to `.step-*.partial`, reads it back and reports success or an error; only when all succeeded
does rank 0 add the manifest, rename the folder and switch `latest`. All ranks must share one file system.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megahead.checkpoint.all_ranks import run_on_all_ranks
from megahead.checkpoint.folders import check_lengths, clear_remains, partial_folder, publish, step_folder
from megahead.checkpoint.manifest import FileEntry, Manifest, TensorEntry
from megahead.checkpoint.retention import KEEP_NO_OTHERS, KeepRules, abandon_after, retain
from megahead.distributed import Group, RowShard
from megahead.errors import CheckpointError
from megahead.files import fsync, sha256_of


def save_checkpoint(
    root: Path,
    step: int,
    tensors: Iterable[tuple[str, Tensor | RowShard]],
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
    partial, final = partial_folder(root, step), step_folder(root, step)

    def describe_error(error: Exception) -> str:
        return _sentence(error, partial, snapshot.total_bytes)

    def finish() -> None:
        if group.rank == 0:
            manifest.write(partial)
            check_lengths(partial, manifest)  # checks too that this rank sees what the others wrote
            abandon_after(final, step if parent_step is None else min(parent_step, step))
            publish(partial, final)
            retain(root, final, keep, keep_rules)

    try:
        run_on_all_ranks(
            group, lambda: _prepare(partial, snapshot.total_bytes) if group.rank == 0 else None, describe_error
        )
        written = run_on_all_ranks(group, lambda: _write(partial, snapshot), describe_error)
        files = dict(zip(snapshot.file_names, written, strict=True))
        manifest = Manifest(step=step, state=state, config=config, tensors=snapshot.entries, files=files)
        run_on_all_ranks(group, finish, describe_error)
    except CheckpointError:
        if group.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return final


@dataclass(frozen=True)
class Snapshot:
    """This rank's share of a checkpoint's tensors, and the manifest entries of all of them."""

    tensors: dict[str, Tensor]
    file: str
    file_names: list[str]
    entries: dict[str, TensorEntry]
    total_bytes: int

    @staticmethod
    def take(tensors: Iterable[tuple[str, Tensor | RowShard]], group: Group, *, copied: bool = False) -> Snapshot:
        """Each tensor goes to the rank with the fewest bytes so far (every rank computes the same choice); of a tensor
        that is sharded round-robin each rank writes its own rows.

        `copied`: copy the tensors, so that the originals may change.
        """
        names = [f"tensors-{rank:05d}-of-{group.size:05d}.safetensors" for rank in range(group.size)]
        loads = [0] * group.size
        mine: dict[str, Tensor] = {}
        entries: dict[str, TensorEntry] = {}
        for name, given in tensors:
            writers = range(group.size) if isinstance(given, RowShard) else (loads.index(min(loads)),)
            part, shape = (given.part, given.shape) if isinstance(given, RowShard) else (given, given.shape)
            for rank in writers:
                loads[rank] += shape.numel() * part.itemsize // len(writers)
            files = tuple(names[rank] for rank in writers)
            dtype = str(part.dtype).removeprefix("torch.")
            entries[name] = TensorEntry(file=files if len(files) > 1 else files[0], shape=tuple(shape), dtype=dtype)
            if group.rank in writers:
                mine[name] = part.detach().to("cpu", copy=True).contiguous() if copied else _standalone(part)
        return Snapshot(mine, names[group.rank], names, entries, sum(loads))


def _standalone(tensor: Tensor) -> Tensor:
    """The tensor on the CPU, contiguous and in a storage of its own, as safetensors requires; copied only if needed."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _prepare(partial: Path, needed: int) -> None:
    root = partial.parent
    root.mkdir(parents=True, exist_ok=True)
    clear_remains(root)
    if shutil.disk_usage(root).free < needed:
        raise OSError(errno.ENOSPC, "no room", str(root))
    partial.mkdir()


def _write(partial: Path, snapshot: Snapshot) -> FileEntry:
    path = partial / snapshot.file
    save_file(snapshot.tensors, path)
    path.chmod(partial.stat().st_mode & 0o666)  # safetensors makes files that only the user can read
    fsync(path)
    with safe_open(path, framework="pt") as file:
        wrong = [name for name, tensor in snapshot.tensors.items() if not _same_bytes(tensor, file.get_tensor(name))]
    if wrong:
        raise CheckpointError(f"`{path}` must read back as it was written, but {wrong[0]} does not; check the disk.")
    return FileEntry(bytes=path.stat().st_size, sha256=sha256_of(path))


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _sentence(error: Exception, partial: Path, needed: int) -> str:
    root = partial.parent
    if isinstance(error, CheckpointError):
        return str(error)
    if not _is_full(error):
        return f"`{root}` must take a checkpoint, but cannot ({error}); older checkpoints are unharmed."
    there = shutil.disk_usage(root).free + sum(file.stat().st_size for file in partial.glob("*"))
    lack = f"{needed - there} bytes are missing" if needed > there else "its disk or quota is full"
    return (
        f"`{root}` must have room for a checkpoint of {needed} bytes, but {lack}; free some or lower "
        "training.keep_checkpoints (older checkpoints are unharmed)."
    )


def _is_full(error: Exception) -> bool:
    """Whether the disk is full: an error code from the system, only a text from safetensors."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return isinstance(error, SafetensorError) and f"os error {errno.ENOSPC}" in str(error)
