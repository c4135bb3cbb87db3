"""Checkpoints with any tensors, saved by all ranks of a group into a folder that may hold others."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from megahead.checkpoints.disk import DiskStorage, write_snapshot
from megahead.checkpoints.format import Header, Snapshot
from megahead.checkpoints.store import Ancestry, RetentionRules, new_checkpoint_name, step_of
from megahead.distributed.group import Group
from megahead.distributed.tensors import RoundRobinShard


def save_checkpoint(
    root: Path,
    step: int,
    tensors: Iterable[tuple[str, Tensor | RoundRobinShard]],
    *,
    state: dict[str, Any],
    config: dict[str, Any],
    group: Group,
    rules: RetentionRules = RetentionRules(),  # noqa: B008 - frozen
    parent_step: int | None = None,
) -> Path:
    """As `write_snapshot`. `parent_step`: the step of the checkpoint in `root` that this one continues, -1 for none,
    None for `step`; all others are orphaned."""
    snapshot = Snapshot.take(tensors, group)
    ancestry = read_ancestry(root, step if parent_step is None else parent_step) if group.rank == 0 else Ancestry()
    header = Header(new_checkpoint_name(step), step, state, config, ancestry.ancestors, ancestry.orphaned)
    return write_snapshot(root, group.broadcast_object(header), snapshot, group, rules)


def read_ancestry(root: Path, step: int) -> Ancestry:
    """That of a run that goes on from the newest checkpoint in `root` with at most this step."""
    disk = DiskStorage(root)
    tip = next((name for name in disk.history() if step_of(name) <= step), None)
    return Ancestry.of(tip, None if tip is None else disk.manifest(tip), disk.names())
