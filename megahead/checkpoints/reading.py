"""Reads checkpoints tensor by tensor; a file's checksum is verified before its first tensor is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megahead.checkpoints.disk import find_checkpoint, orphaned_folders, step_folders
from megahead.checkpoints.format import (
    FORMAT,
    MANIFEST,
    Manifest,
    TensorEntry,
    check_files,
    check_lengths,
    run_generator_on_all_ranks,
    run_on_all_ranks,
    run_on_first_rank,
    share_of,
)
from megahead.config.loading import config_from_checkpoint
from megahead.config.run import RunConfig
from megahead.config.training import OptimizerConfig
from megahead.distributed.group import Group
from megahead.distributed.tensors import block_ranges, interleave_shards, join_blocks
from megahead.errors import CheckpointError
from megahead.files import refresh_nfs
from megahead.sharded_embedding.optimizer import LAST_STEP, LEARNING_RATES, ROW_OPTIMIZERS

SINGLE_RANK = Group()


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint `path`, or the newest complete one in a run or checkpoints folder.

    Checks the manifest and the length of every file; contents are verified when they are read. CheckpointError names
    the damaged file.
    """
    folder = find_checkpoint(path)
    if folder is None:
        for damaged in step_folders(path):
            _open_folder(damaged)
        orphaned = ", ".join(folder.name for folder in orphaned_folders(path))
        problem = f"holds only orphaned ones ({orphaned}); name one of these" if orphaned else "is neither"
        raise CheckpointError(
            f"`{path}` must be a checkpoint (a folder with {MANIFEST}) or a folder that holds complete ones (step-*), "
            f"but {problem}."
        )
    return _open_folder(folder)


def newest_valid(path: Path, group: Group = SINGLE_RANK) -> tuple[Checkpoint | None, list[str]]:
    """The newest undamaged checkpoint in a run or checkpoints folder, every byte verified, and a sentence for each
    newer, damaged one. Skips checkpoints after the one that a rollback went back to. Collective."""
    return first_valid(path, lambda: step_folders(path), group)


def first_valid(root: Path, folders: Callable[[], list[Path]], group: Group) -> tuple[Checkpoint | None, list[str]]:
    """As `newest_valid`, for the folders that rank 0 lists below `root`, a path that may differ by node."""
    damage: list[str] = []
    for name in run_on_first_rank(group, lambda: [folder.relative_to(root) for folder in folders()]):
        try:
            return open_verified(root / name, group), damage
        except CheckpointError as error:
            damage.append(str(error))
    return None, damage


def find_on_first_rank(path: Path, group: Group) -> Path | None:
    """The checkpoint that `find_checkpoint` finds on rank 0, as a path on this rank. `path` may differ by node.
    Collective."""

    def find() -> Path | None:
        folder = find_checkpoint(path)
        return None if folder is None else folder.relative_to(path.parent)

    found = run_on_first_rank(group, find)
    return None if found is None else path.parent / found


def open_verified(folder: Path, group: Group) -> Checkpoint:
    """The checkpoint in a step folder, every byte verified: each rank reads a share of its files, at about 1 GB per
    second. Collective; the same CheckpointError on all ranks."""
    refresh_nfs(folder)  # this node may have looked before another one wrote it
    run_on_all_ranks(group, lambda: check_lengths(folder, Manifest.read(folder)))
    checkpoint = Checkpoint(folder, Manifest.read(folder))
    checkpoint.verify(group)
    return checkpoint


def _open_folder(folder: Path) -> Checkpoint:
    manifest = Manifest.read(folder)
    check_lengths(folder, manifest)
    return Checkpoint(folder, manifest)


class Checkpoint:
    """A complete step folder; see `open_checkpoint`."""

    format = FORMAT

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self.step = manifest.step
        """Optimizer steps so far."""
        self.state = manifest.state
        """The trainer's counters."""
        self.config = manifest.config
        """Settings of the run."""
        self.files = manifest.files
        """Length and checksum of each tensor file."""
        self.tensors = manifest.tensors
        """File, shape and dtype of each tensor."""
        self.applies_updates = False
        """Whether rows with pending updates are read as those of a dense embedding: with these updates."""
        self._verified: set[str] = set()

    def run_config(self) -> RunConfig:
        """The config of the phase that saved it; ConfigErrors for settings that this version does not have."""
        return config_from_checkpoint(self.config, source=f"the configuration in {self.folder}")

    def state_value(self, name: str, type_: Any, default: Any = None) -> Any:
        """`state[name]`, or `default` if it is missing, as in earlier versions; CheckpointError if it is not an
        instance of `type_`."""
        value = self.state.get(name, default)
        if not isinstance(value, type_):
            raise CheckpointError(f"`{self.folder / MANIFEST}` has no valid `{name}`; use another checkpoint.")
        return value

    def names(self) -> list[str]:
        """Names of readable tensors: the saved ones, then those that are computed from rows with pending updates."""
        pending = [name.removeprefix(_PENDING_PREFIX) for name in self.tensors if name.startswith(_PENDING_PREFIX)]
        return [*self.tensors, *(name for name in pending if name.split("/")[0] not in (LAST_STEP, LEARNING_RATES))]

    def read(self, name: str) -> Tensor:
        """A full tensor on the CPU. CheckpointError if the name is unknown or the file is damaged.

        The first tensor of a file verifies the file's checksum (a full read, about one second per GB); later ones read
        only their own bytes.
        """
        entry = self._entry(name)
        if entry is None:
            shape, blocks = _derive(self, name)
            return join_blocks(blocks, shape)
        return interleave_shards([self._read(file, name) for file in entry.files()])

    def blocks(self, name: str) -> Iterator[Tensor]:
        """Reads the tensor in consecutive blocks of rows, one of them in memory at a time."""
        entry = self._entry(name)
        if entry is None:
            return _derive(self, name)[1]
        return (self.read_rows(name, rows) for rows in block_ranges(entry.shape[0]))

    def shape(self, name: str) -> tuple[int, ...]:
        """The full shape of a tensor; CheckpointError if the name is unknown."""
        entry = self._entry(name)
        return _derive(self, name)[0] if entry is None else entry.shape

    def _entry(self, name: str) -> TensorEntry | None:
        return None if self.applies_updates and name.startswith(_PENDING_PREFIX) else self.tensors.get(name)

    def read_rows(self, name: str, rows: range) -> Tensor:
        """Consecutive rows of a saved tensor, on the CPU; verified as in `read`."""
        files = self.tensors[name].files()
        count = len(files)
        row_ranges = [range(-(-(rows.start - r) // count), -(-(rows.stop - r) // count)) for r in range(count)]
        first_file = rows.start % count  # the file that holds the first of these rows
        parts = [self._read(file, name, row_range) for file, row_range in zip(files, row_ranges, strict=True)]
        return interleave_shards([*parts[first_file:], *parts[:first_file]])

    def _read(self, file: str, name: str, rows: range | None = None) -> Tensor:
        """The part of a tensor in `file`, or `rows` of that part."""
        if file not in self._verified:
            for _ in check_files(self.folder, {file: self.files[file]}):
                pass
            self._verified.add(file)
        try:
            with safe_open(self.folder / file, framework="pt") as opened_file:
                tensor: Tensor = (
                    opened_file.get_tensor(name)
                    if rows is None
                    else opened_file.get_slice(name)[rows.start : rows.stop]
                )
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"`{self.folder / file}` must hold {name}, but cannot be read ({error}).") from None
        return tensor

    def verify(self, group: Group = SINGLE_RANK) -> None:
        """Verifies the checksum of every file once, divided among `group`. Collective; the same CheckpointError on all
        ranks."""
        assigned = share_of(self.files, group)
        unread = {name: entry for name, entry in assigned.items() if name not in self._verified}
        run_generator_on_all_ranks(group, check_files(self.folder, unread))
        self._verified.update(self.files)


# Conversion of an embedding between up-to-date rows and rows with pending updates.
#
# A run with `engine.embedding: rows` saves `late/KIND/NAME`: weights and moments as of the last update of each row,
# `touched` (the step of that update) and `rates` (the learning rate of every step). Reading `KIND/NAME` applies the
# pending updates, which gives the result of AdamW over all rows. Reading `late/KIND/NAME` from a checkpoint with a
# dense embedding gives rows without pending updates.


_PENDING_PREFIX = "late/"
"""Prefix of a sharded embedding's tensors in a checkpoint."""


def _derive(checkpoint: Checkpoint, name: str) -> tuple[tuple[int, ...], Iterator[Tensor]]:
    """Shape and blocks of the tensor `name`, which was not saved, computed from saved tensors; CheckpointError if these
    are missing. Reads blocks on iteration."""
    tensors = checkpoint.tensors
    if f"{_PENDING_PREFIX}{name}" in tensors:
        return tensors[f"{_PENDING_PREFIX}{name}"].shape, _updated_blocks(checkpoint, name)
    dense_name = name.removeprefix(_PENDING_PREFIX)
    kind, _, parameter = dense_name.partition("/")
    is_dense = name.startswith(_PENDING_PREFIX) and f"weight/{parameter}" in checkpoint.names()
    if is_dense and kind == LAST_STEP:
        rows = checkpoint.shape(f"weight/{parameter}")[:1]
        last_step = torch.full(rows, checkpoint.state_value("optimizer_steps", int), dtype=torch.int32)
        return rows, iter([last_step])
    if is_dense and kind == LEARNING_RATES:
        rates = torch.zeros(checkpoint.state_value("optimizer_steps", int), dtype=torch.float64)
        return rates.shape, iter([rates])
    if is_dense and dense_name in checkpoint.names():
        return checkpoint.shape(dense_name), checkpoint.blocks(dense_name)
    raise CheckpointError(
        f"`{checkpoint.folder}` must hold the tensor {name}, but does not; another model or objective saved it."
    )


def _updated_blocks(checkpoint: Checkpoint, name: str) -> Iterator[Tensor]:
    """Blocks of the tensor `name`, saved with pending updates, after these updates."""
    kind, _, parameter = name.partition("/")
    config = OptimizerConfig.model_validate(checkpoint.config.get("optimizer"))
    row_optimizer = ROW_OPTIMIZERS[config.table.rule](config)
    rates = f"{_PENDING_PREFIX}{LEARNING_RATES}/{parameter}"
    row_optimizer.resume(checkpoint.read_rows(rates, range(checkpoint.tensors[rates].shape[0])).numpy())
    kinds, count = ("weight", *row_optimizer.moments), checkpoint.tensors[f"{_PENDING_PREFIX}{name}"].shape[0]
    for block in block_ranges(count):
        rows = {name: checkpoint.read_rows(f"{_PENDING_PREFIX}{name}/{parameter}", block) for name in kinds}
        last_steps = checkpoint.read_rows(f"{_PENDING_PREFIX}{LAST_STEP}/{parameter}", block)
        row_optimizer.apply_pending_updates_(rows, last_steps)
        yield rows[kind]


@dataclass(frozen=True)
class RecoveryResult:
    """The result of a search for a checkpoint newer than the disk's in the nodes' memory or the remote store."""

    source: str
    """`memory` or `mirror`, as in the log."""

    checkpoint: Checkpoint | None
    """The recovered one, on disk; None if all newer ones are damaged."""

    problems: list[str]
    """A sentence for each damaged checkpoint or file."""

    message: str = ""
    """A description for the banner."""

    details: dict[str, Any] = field(default_factory=dict)
    """Fields for the log."""

    def lines(self) -> list[tuple[str, str]]:
        """For the banner."""
        messages = [] if self.checkpoint is None else [self.message]
        return [("in memory" if self.source == "memory" else self.source, each) for each in [*self.problems, *messages]]

    def fields(self) -> dict[str, Any]:
        """For the log."""
        return {"problems": self.problems, **self.details}


def target_samples(checkpoint: Checkpoint) -> int:
    """How many samples the counter `targets` covers: those of steps that were applied and not rolled back. For
    checkpoints without this number: their step times `batch.global_size`."""
    batch = checkpoint.config.get("batch")
    global_size = batch.get("global_size") if isinstance(batch, dict) else None
    default = checkpoint.step * global_size if isinstance(global_size, int) else None
    samples: int = checkpoint.state_value("target_samples", int, default)
    return samples
