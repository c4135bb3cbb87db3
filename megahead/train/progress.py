"""The progress of a run: captures its state for a checkpoint, and restores it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import chain
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megahead.checkpoints.disk import DiskStorage
from megahead.checkpoints.format import Header, Snapshot
from megahead.checkpoints.reading import Checkpoint, first_valid, target_samples
from megahead.checkpoints.store import (
    Ancestry,
    ancestors_among,
    is_ancestor,
    is_checkpoint_name,
    new_checkpoint_name,
    step_of,
)
from megahead.config.plan import Phase, same_objective
from megahead.data.batch import Batch
from megahead.data.strategy import TargetErrorCounts
from megahead.distributed.group import Group
from megahead.distributed.tensors import is_finite
from megahead.engine.engine import Engine
from megahead.errors import CheckpointError
from megahead.run_folder import RunFolder
from megahead.train.start import WithInitialHead, refuse_damaged

_KEPT_COUNTERS = {
    "samples": int,
    "tokens": int,
    "skipped_steps": int,
    "spikes": int,
    "rollbacks": int,
    "seconds": float | int,
}
"""Types of the counters that a rollback does not change."""

_RESTORED_COUNTERS = {"step": int, "targets": int, "recent_losses": list, "validation": dict | None}
"""Types of the counters that a rollback restores."""

_DEFAULTS = {"spikes": 0, "rollbacks": 0, "recent_losses": []}
"""Values for checkpoints of earlier versions, which lack these counters."""

_ERROR_COUNTS = "state/difficulty"


@dataclass
class TrainingState:
    """Counters of the run, and fingerprints of its data. A skipped step increases `samples` but not `step`."""

    padded_vocab_size: int

    group_samples: int
    """Samples in a candidate group, whose targets are candidates for each other; set at the start of the run."""

    step: int = 0
    """Applied optimizer steps."""

    samples: int = 0
    """Samples read by all data ranks together, which is also the next sample's index."""

    tokens: int = 0
    """Input tokens read by all data ranks together."""

    targets: int = 0
    """Targets trained on since the attention last changed between causal and bidirectional."""

    target_samples: int = 0
    """Samples of `targets`: fewer than `samples` if steps were skipped or rolled back."""

    skipped_steps: int = 0
    """Steps whose samples were read but that were not applied: not finite, or skipped as a spike."""

    spikes: int = 0
    """Steps whose loss was far above recent losses, applied or not."""

    rollbacks: int = 0
    """Rollbacks to a checkpoint."""

    seconds: float = 0.0
    """Training time of all sessions together."""

    recent_losses: list[float] = field(default_factory=list)
    """Losses of the last `faults.spike_window` applied steps, for detecting spikes."""

    validation: dict[str, Any] | None = None
    """`step` and `loss` of the last evaluation, and a fingerprint of its `data`."""

    data_fingerprints: dict[str, Any] = field(default_factory=dict)
    """See `data_fingerprints` in datasets.py; saved as `texts` in a checkpoint."""

    local_target_counts: Tensor = field(init=False)
    """int64 [padded vocabulary]: counts of `targets` by id on this rank; rank 0's include the resumed counts."""

    target_error_counts: TargetErrorCounts | None = None
    """Counts of mispredicted targets by id, for adaptive masking; not changed by a rollback."""

    dataset_counts: Tensor = field(init=False)
    """int64 [padded vocabulary]: counts of ids in the training dataset, or zeros if it has none; used for smoothing
    `local_target_counts` of rare targets."""

    def __post_init__(self) -> None:
        self.local_target_counts = torch.zeros(self.padded_vocab_size, dtype=torch.int64)
        self.dataset_counts = torch.zeros(self.padded_vocab_size, dtype=torch.int64)

    def record_applied_step(self, samples: int, targets: int) -> None:
        """Counts an applied step over `samples` samples with `targets` targets."""
        self.step += 1
        self.target_samples += samples
        self.targets += targets

    def reset_target_counts(self) -> None:
        """Resets the target counts (for the training-free head), since the next phase has other targets."""
        self.targets = self.target_samples = 0
        self.local_target_counts.zero_()

    def count_targets(self, batch: Batch) -> None:
        """Adds a batch's targets to `local_target_counts`."""
        ids_N = batch.target_ids_N
        self.local_target_counts.index_add_(0, ids_N, torch.ones_like(ids_N))

    def target_counts(self, group: Group) -> Tensor:
        """int64 [padded vocabulary]: counts over all ranks of `group` (CPU tensors). Collective."""
        return group.all_reduce_(self.local_target_counts.clone())

    def tensors(self, group: Group) -> dict[str, Tensor]:
        """The tensors of this state for a checkpoint, by name. Collective over the data ranks."""
        counts = {"state/target_counts": self.target_counts(group), "state/dataset_counts": self.dataset_counts}
        if self.target_error_counts is not None:
            counts[_ERROR_COUNTS] = self.target_error_counts.state(group)
        return counts

    @property
    def evaluated(self) -> bool:
        """Whether the last evaluation was at the current step."""
        return self.validation is not None and self.validation.get("step") == self.step

    def mean_group_targets(self, expected: int) -> float:
        """Mean number of targets in a candidate group so far; before the first step, `expected` targets per sample are
        assumed."""
        targets_per_sample = self.targets / self.target_samples if self.target_samples else expected
        return self.group_samples * targets_per_sample

    def counters(self) -> dict[str, Any]:
        """All counters except tensors, as in a checkpoint's JSON."""
        names = (*_KEPT_COUNTERS, *_RESTORED_COUNTERS, "target_samples", "group_samples")
        counters = {name: copy(getattr(self, name)) for name in names}
        return counters | {"texts": copy(self.data_fingerprints)}

    def restore(self, checkpoint: Checkpoint, group: Group) -> None:
        """Restores the counters, target counts and error counts from `checkpoint`."""
        self._restore_counters(_KEPT_COUNTERS, checkpoint)
        if self.target_error_counts is not None:
            has_counts = _ERROR_COUNTS in checkpoint.tensors  # unless another strategy masked so far
            counts = checkpoint.read(_ERROR_COUNTS) if has_counts else self.target_error_counts.state(group)
            self.target_error_counts.restore(counts, self.samples, group)
        self.roll_back_to(checkpoint, group)

    def roll_back_to(self, checkpoint: Checkpoint, group: Group) -> None:
        """Restores the target counts and _RESTORED_COUNTERS from `checkpoint`; keeps _KEPT_COUNTERS as they are."""
        self._restore_counters(_RESTORED_COUNTERS, checkpoint)
        self.target_samples = target_samples(checkpoint)
        counts = checkpoint.read("state/target_counts")
        if counts.shape != self.local_target_counts.shape:
            size = len(self.local_target_counts)
            raise CheckpointError(f"{checkpoint.folder} must count {size} ids, but has {tuple(counts.shape)} instead.")
        self.local_target_counts.copy_(counts if group.rank == 0 else torch.zeros_like(counts))

    def _restore_counters(self, types: Mapping[str, Any], checkpoint: Checkpoint) -> None:
        for name, type_ in types.items():
            setattr(self, name, copy(checkpoint.state_value(name, type_, _DEFAULTS.get(name))))


@dataclass(frozen=True)
class CapturedCheckpoint:
    """One rank's part of a checkpoint, captured after a step and written while training continues."""

    header: Header
    """The checkpoint's name and ancestors, the counters, and the phase's config; the same on all ranks."""

    snapshot: Snapshot

    def check_finite(self) -> None:
        """CheckpointError unless all numbers are finite, so that the run can always resume from its newest checkpoint.
        Measured: 0.08 s, compared with 1.7 s of writing (360 MiB, one thread)."""
        invalid = [name for name, tensor in self.snapshot.tensors.items() if not is_finite(tensor)]
        for name, value in self.header.state.items():
            invalid += [] if all(map(isfinite, _floats(value))) else [f"state/{name}"]
        if invalid:
            raise CheckpointError(
                f"a checkpoint must hold finite numbers only, but at step {self.header.step} {invalid[0]} has others; "
                "it was not saved (older checkpoints are unharmed): clip gradients or lower optimizer.learning_rate, "
                "and resume."
            )


def _floats(value: Any) -> Iterator[float]:
    """All floats in a value of a checkpoint's JSON."""
    if isinstance(value, float):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _floats(part)


# The history of a run: the checkpoints in its folder from which its present weights descend. Those after the checkpoint
# that was resumed or rolled back to are not part of it.


@dataclass
class RunHistory:
    """A run's folder of checkpoints, and the ancestry of its weights."""

    root: Path
    ancestry: Ancestry

    @staticmethod
    def after_resume(resumed: Checkpoint | None, folder: RunFolder, remote_names: Sequence[str] = ()) -> RunHistory:
        """The history of a session in the run `folder` that starts from `resumed`, which may be None or outside of it.
        `remote_names`: the checkpoints in the remote store."""
        disk = DiskStorage(folder.checkpoints)
        run, name, manifest = RunHistory(disk.root, Ancestry()), None, None
        if resumed is not None and run.contains(resumed):
            name, manifest = resumed.folder.name, resumed.manifest
        return replace(run, ancestry=Ancestry.of(name, manifest, disk.names(), remote_names))

    def name_of(self, checkpoint: Checkpoint) -> str:
        """The checkpoint's folder name if it is in `root`, else its full path."""
        return checkpoint.folder.name if self._is_in_root(checkpoint) else str(checkpoint.folder)

    def contains(self, checkpoint: Checkpoint) -> bool:
        """Whether the checkpoint is in `root`, and was not renamed by an earlier version."""
        return self._is_in_root(checkpoint) and is_checkpoint_name(checkpoint.folder.name)

    def _is_in_root(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.folder.parent.resolve() == self.root.resolve()

    def last_common_step(self) -> int:
        """The step of the newest checkpoint that the disk's `latest` leads to and from which the present weights
        descend; log records up to it are valid."""
        names = DiskStorage(self.root).history()
        return max((step_of(name) for name in names if is_ancestor(name, self.ancestry.ancestors)), default=0)

    def orphaned_by_next_save(self) -> list[str]:
        """Checkpoints that the disk's `latest` leads to, but from which the present weights do not descend: the next
        save makes them orphans."""
        return [name for name in DiskStorage(self.root).history() if not is_ancestor(name, self.ancestry.ancestors)]

    def folders(self) -> list[Path]:
        """The existing ancestors, the newest first."""
        return [self.root / name for name in ancestors_among(self.ancestry.ancestors, DiskStorage(self.root).names())]


@dataclass(frozen=True)
class Progress:
    """The state of a run in one of its phases. All methods are collective over `world_group`."""

    phase: Phase

    engine: Engine
    """Weights and optimizer state."""

    state: TrainingState
    history: RunHistory

    data_group: Group
    """Data-parallel ranks, for CPU tensors."""

    world_group: Group
    """All ranks, for CPU tensors."""

    launch_id: str = ""
    """`Launch.launch_id`; saved as `launch` in a checkpoint."""

    def capture(self, group: Group, *, copied: bool) -> CapturedCheckpoint:
        """Captures the state after the last step; each rank of `group` writes a part. `copied`: copy the tensors, so
        that training may continue before they are written."""
        name = self.world_group.broadcast_object(new_checkpoint_name(self.state.step))
        tensors = chain(self.engine.tensors(), self.state.tensors(self.data_group).items())
        snapshot = Snapshot.take(tensors, group, copied=copied)
        counters = self.state.counters() | {"optimizer_steps": self.engine.optimizer_steps}
        counters |= {"scale": self.engine.loss_scale.state(), "phase_began": self.phase.steps.start}
        counters |= {"launch": self.launch_id} if self.launch_id else {}
        settings = self.phase.config.model_dump(mode="json")
        ancestry = self.history.ancestry
        header = Header(name, self.state.step, counters, settings, ancestry.ancestors, ancestry.orphaned)
        return CapturedCheckpoint(header, snapshot)

    def resume_from(self, checkpoint: Checkpoint) -> None:
        """Restores the complete state of `checkpoint`."""
        self._load(checkpoint)
        self.state.restore(checkpoint, self.data_group)
        self._reset_after_phase_change(checkpoint)

    def roll_back(self) -> Path | None:
        """Restores weights and training counters of the newest valid checkpoint in the history; training continues with
        the next samples.

        Returns the checkpoint's folder; None if there is none from this phase on, and nothing has changed.
        """
        checkpoint, damage = first_valid(self.history.root, self.history.folders, self.world_group)
        if checkpoint is None:
            refuse_damaged(self.history.root, damage)
        if checkpoint is None or checkpoint.step < self.phase.steps.start:
            return None
        self._load(checkpoint)
        self.state.roll_back_to(checkpoint, self.data_group)
        self._reset_after_phase_change(checkpoint)
        self.history.ancestry.roll_back(checkpoint.folder.name)
        return checkpoint.folder

    def _load(self, checkpoint: Checkpoint) -> None:
        """Loads weights and optimizer state; a trained head that it lacks gets its initial values. If this run
        updates by other settings, rows get their pending updates by those of the checkpoint first."""
        old, new = checkpoint.run_config().optimizer, self.phase.config.optimizer
        checkpoint.applies_updates = (old.betas, old.eps, old.weight_decay) != (new.betas, new.eps, new.weight_decay)
        self.engine.load(WithInitialHead(checkpoint), checkpoint.state_value("optimizer_steps", int))
        self.engine.loss_scale.restore(checkpoint.state_value("scale", dict, default={}))

    def _reset_after_phase_change(self, checkpoint: Checkpoint) -> None:
        """Resets recent losses and target counts if those of the checkpoint's phase do not apply to this phase."""
        saved, config = checkpoint.run_config(), self.phase.config
        if not same_objective(saved, config):
            self.state.recent_losses.clear()
        if saved.model.is_causal != config.model.is_causal:
            self.state.reset_target_counts()
