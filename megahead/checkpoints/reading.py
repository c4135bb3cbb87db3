"""Reads checkpoints, verified, also with rows whose updates are pending."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megahead.checkpoints.disk import find_checkpoint, step_folders
from megahead.checkpoints.format import (
    FORMAT,
    MANIFEST,
    FileEntry,
    Manifest,
    TensorEntry,
    check_files,
    check_lengths,
    run_long_on_all_ranks,
    run_on_all_ranks,
    share_of,
)
from megahead.config.training import OptimizerConfig
from megahead.distributed.group import Group
from megahead.distributed.tensors import block_ranges, interleave_shards, joined
from megahead.errors import CheckpointError
from megahead.sharded_embedding.optimizer import RowRule, build_row_rule

# An embedding in a checkpoint, in the form that its reader needs: all rows up to date, or stale rows.
#
# Stale rows are those that the last steps did not update, because no batch used them. A run with `engine.embedding:
# rows` saves `late/KIND/NAME`: weights and moments as of each row's last update, `touched` (the step of that update)
# and `rates` (the learning rate of every step). Reading `KIND/NAME` then gives what AdamW over all rows would have
# made of them. Reading `late/KIND/NAME` of a checkpoint with an ordinary embedding gives rows that its last step
# updated.


_STALE = "late/"
"""What their names begin with in a checkpoint."""
_TOUCHED, _RATES = "touched", "rates"


class Stored(Protocol):
    """What a checkpoint offers."""

    folder: Any

    @property
    def tensors(self) -> dict[str, Any]: ...
    @property
    def config(self) -> dict[str, Any]: ...
    def state_value(self, name: str, type_: Any, absent: Any = None) -> Any: ...
    def read(self, name: str) -> Tensor: ...
    def read_rows(self, name: str, rows: range) -> Tensor: ...
    def blocks(self, name: str) -> Iterator[Tensor]: ...


def stale_names(stored: Iterable[str]) -> list[str]:
    """The names that can be read because stale rows were saved for them."""
    names = [name.removeprefix(_STALE) for name in stored if name.startswith(_STALE)]
    return [name for name in names if name.split("/")[0] not in (_TOUCHED, _RATES)]


@dataclass(frozen=True)
class DerivedTensor:
    """A tensor that was not saved, but can be made of others that were."""

    shape: tuple[int, ...]
    blocks: Iterator[Tensor]


def derive(checkpoint: Stored, name: str) -> DerivedTensor:
    """`name`, which was not saved, made of tensors that were; CheckpointError where that cannot be. Blocks are read
    when they are iterated."""
    if f"{_STALE}{name}" in checkpoint.tensors:
        return DerivedTensor(checkpoint.tensors[f"{_STALE}{name}"].shape, _up_to_date(checkpoint, name))
    kind, _, parameter = name.removeprefix(_STALE).partition("/")
    known = name.startswith(_STALE) and f"weight/{parameter}" in checkpoint.tensors
    if known and kind == _TOUCHED:
        rows = checkpoint.tensors[f"weight/{parameter}"].shape[:1]
        touched = torch.full(rows, checkpoint.state_value("optimizer_steps", int), dtype=torch.int32)
        return DerivedTensor(rows, iter([touched]))
    if known and kind == _RATES:
        rates = torch.zeros(checkpoint.state_value("optimizer_steps", int), dtype=torch.float64)
        return DerivedTensor(rates.shape, iter([rates]))
    if known and f"{kind}/{parameter}" in checkpoint.tensors:
        plain = f"{kind}/{parameter}"
        return DerivedTensor(checkpoint.tensors[plain].shape, checkpoint.blocks(plain))
    raise CheckpointError(
        f"`{checkpoint.folder}` must hold the tensor {name}, but does not; another model or objective saved it."
    )


def _up_to_date(checkpoint: Stored, name: str) -> Iterator[Tensor]:
    """`name`, saved as stale rows, with all updates that they wait for."""
    kind, _, parameter = name.partition("/")
    rule = _rule_of(checkpoint)
    rule.resume(checkpoint.read(f"{_STALE}{_RATES}/{parameter}").numpy())
    kinds, count = ("weight", *rule.moments), checkpoint.tensors[f"{_STALE}{name}"].shape[0]
    for block in block_ranges(count):
        rows = {each: checkpoint.read_rows(f"{_STALE}{each}/{parameter}", block) for each in kinds}
        rule.catch_up_(rows, checkpoint.read_rows(f"{_STALE}{_TOUCHED}/{parameter}", block))
        yield rows[kind]


def _rule_of(checkpoint: Stored) -> RowRule:
    """The optimizer of its rows (`optimizer.table.rule`)."""
    config = OptimizerConfig.model_validate(checkpoint.config.get("optimizer"))
    return build_row_rule(config.table.rule, config)


# Reads checkpoints: state, and tensors one by one; each file's checksum is verified before its first tensor.


_ALONE = Group()


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint that `path` means (a step folder, a checkpoints folder, a run folder).

    Checks the manifest and the length of every file; contents are verified when they are read. Raises a
    CheckpointError that names the file at fault.
    """
    folder = find_checkpoint(path)
    if folder is None:
        for damaged in step_folders(path):
            _opened(damaged)
        raise CheckpointError(
            f"`{path}` must be a checkpoint (a folder with {MANIFEST}) or a folder that holds complete ones (step-*), "
            "but is neither."
        )
    return _opened(folder)


def newest_sound(path: Path, group: Group = _ALONE) -> tuple[Checkpoint | None, list[str]]:
    """The newest undamaged checkpoint of the history in a run or checkpoints folder, every byte verified, and one
    sentence for each newer but damaged one. Collective."""
    return first_sound(lambda: step_folders(path), group)


def first_sound(folders: Callable[[], list[Path]], group: Group) -> tuple[Checkpoint | None, list[str]]:
    """The first undamaged one of some step folders, which rank 0 lists; otherwise as `newest_sound`."""
    damage: list[str] = []
    for folder in run_on_all_ranks(group, lambda: folders() if group.rank == 0 else [])[0]:
        try:
            return open_together(folder, group), damage
        except CheckpointError as error:
            damage.append(str(error))
    return None, damage


def open_together(folder: Path, group: Group) -> Checkpoint:
    """The checkpoint in a step folder, every byte verified: each rank reads a share of its files, at about 1 GB per
    second. Collective; the same CheckpointError on all ranks."""
    run_on_all_ranks(group, lambda: check_lengths(folder, Manifest.read(folder)))
    checkpoint = Checkpoint(folder, Manifest.read(folder))
    checkpoint.verify(group)
    return checkpoint


def _opened(folder: Path) -> Checkpoint:
    manifest = Manifest.read(folder)
    check_lengths(folder, manifest)
    return Checkpoint(folder, manifest)


class Checkpoint:
    """A complete step folder; see `open_checkpoint`."""

    format = FORMAT

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self._manifest = manifest
        self._verified: set[str] = set()

    @property
    def manifest(self) -> Manifest:
        """All that its JSON says."""
        return self._manifest

    @property
    def step(self) -> int:
        """Optimizer steps of the run when it was saved."""
        return self._manifest.step

    @property
    def state(self) -> dict[str, Any]:
        """The trainer's counters."""
        return self._manifest.state

    def state_value(self, name: str, type_: Any, absent: Any = None) -> Any:
        """`state[name]`, or `absent` if it is missing (earlier versions wrote less); CheckpointError if it is not an
        instance of `type_`."""
        value = self.state.get(name, absent)
        if not isinstance(value, type_):
            raise CheckpointError(f"`{self.folder / MANIFEST}` has no valid `{name}`; use another checkpoint.")
        return value

    @property
    def config(self) -> dict[str, Any]:
        """Settings of the run that wrote it."""
        return self._manifest.config

    @property
    def files(self) -> dict[str, FileEntry]:
        """Length and checksum of each file of tensors."""
        return self._manifest.files

    @property
    def tensors(self) -> dict[str, TensorEntry]:
        """File, shape and dtype of each tensor, without reading any."""
        return self._manifest.tensors

    def names(self) -> list[str]:
        """Names of the tensors that can be read: first the saved ones, then those that are computed from stale rows."""
        return [*self._manifest.tensors, *stale_names(self._manifest.tensors)]

    def read(self, name: str) -> Tensor:
        """One full tensor on the CPU.

        Reading the first tensor of a file also verifies the file's checksum (a full read, about one second per GB);
        later tensors read only their own bytes. CheckpointError if the name is unknown or the file is damaged.
        """
        entry = self._manifest.tensors.get(name)
        if entry is None:
            made = derive(self, name)
            return joined(made.blocks, made.shape)
        return interleave_shards([self._read(file, name) for file in entry.files()])

    def blocks(self, name: str) -> Iterator[Tensor]:
        """The same in consecutive blocks of rows; memory holds one of them. Reads when it is iterated."""
        entry = self._manifest.tensors.get(name)
        if entry is None:
            return derive(self, name).blocks
        return (self.read_rows(name, rows) for rows in block_ranges(entry.shape[0]))

    def shape(self, name: str) -> tuple[int, ...]:
        """What `read` would have, without reading it; CheckpointError if the name is unknown."""
        entry = self._manifest.tensors.get(name)
        return derive(self, name).shape if entry is None else entry.shape

    def read_rows(self, name: str, rows: range) -> Tensor:
        """Consecutive rows of a saved tensor, on the CPU; verified as by `read`, but never all of it in memory."""
        files = self._manifest.tensors[name].files()
        count = len(files)
        places = [range(-(-(rows.start - r) // count), -(-(rows.stop - r) // count)) for r in range(count)]
        turn = rows.start % count  # the file that holds the first of these rows
        parts = [self._read(file, name, place) for file, place in zip(files, places, strict=True)]
        return interleave_shards([*parts[turn:], *parts[:turn]])

    def _read(self, file: str, name: str, rows: range | None = None) -> Tensor:
        """The part of a tensor that `file` holds, or these `rows` of that part."""
        self._verify_once(file)
        try:
            with safe_open(self.folder / file, framework="pt") as opened:
                tensor: Tensor = (
                    opened.get_tensor(name) if rows is None else opened.get_slice(name)[rows.start : rows.stop]
                )
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"`{self.folder / file}` must hold {name}, but cannot be read ({error}).") from None
        return tensor

    def verify(self, group: Group = _ALONE) -> None:
        """Verifies the checksum of every file, divided among `group`; afterwards no rank verifies any of them again.

        Collective; the same CheckpointError on all ranks."""
        mine = share_of(self.files, group)
        unread = {name: entry for name, entry in mine.items() if name not in self._verified}
        run_long_on_all_ranks(group, check_files(self.folder, unread), describe_error=str)
        self._verified.update(self.files)

    def _verify_once(self, file: str) -> None:
        if file not in self._verified:
            for _ in check_files(self.folder, {file: self.files[file]}):
                pass
            self._verified.add(file)


# What a place other than the disk had to resume from.


@dataclass(frozen=True)
class Resumed:
    """What came of looking for a newer checkpoint than the disk's: in the memory of nodes, or in the remote store."""

    place: str
    """`memory` or `mirror`, as in the log."""

    checkpoint: Checkpoint | None
    """On the disk now; None: no newer one can be used, for these `problems`."""

    problems: list[str]
    """A sentence for each newer one that cannot be used, or file of one."""

    sentence: str = ""
    """What it was, for the banner."""

    details: dict[str, Any] = field(default_factory=dict)
    """The same for the log."""

    def lines(self) -> list[tuple[str, str]]:
        """For the banner."""
        found = [] if self.checkpoint is None else [self.sentence]
        return [("in memory" if self.place == "memory" else self.place, each) for each in [*self.problems, *found]]

    def facts(self) -> dict[str, Any]:
        """For the log."""
        return {"problems": self.problems, **self.details}


# Counters that earlier versions did not write, computed from what their checkpoints hold.


def target_samples(checkpoint: Checkpoint) -> int:
    """Samples whose targets the checkpoint's `targets` counts: those of steps that were applied and not rolled back.

    For checkpoints without this counter: their step times `batch.global_size`.
    """
    batch = checkpoint.config.get("batch")
    rows = batch.get("global_size") if isinstance(batch, dict) else None
    absent = checkpoint.step * rows if isinstance(rows, int) else None
    samples: int = checkpoint.state_value("target_samples", int, absent)
    return samples
