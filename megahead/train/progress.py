"""How far a run has come: all that a checkpoint holds of it, taken at one step and put back."""

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

from megahead.checkpoints.disk import Disk
from megahead.checkpoints.format import Header, Snapshot
from megahead.checkpoints.reading import Checkpoint, first_valid, target_samples
from megahead.checkpoints.store import Ancestry, ancestors_among, history, is_ancestor, is_name, new_name, step_of
from megahead.config.plan import Phase, same_objective
from megahead.data.batch import Batch
from megahead.data.strategy import ErrorCounts
from megahead.distributed.group import Group
from megahead.distributed.tensors import is_finite
from megahead.engine.engine import Engine
from megahead.errors import CheckpointError
from megahead.run_folder import RunFolder
from megahead.train.datasets import config_of
from megahead.train.start import CheckpointWithHead, refuse_damaged

_KEPT_ON_ROLLBACK = {
    "samples": int,
    "tokens": int,
    "skipped_steps": int,
    "spikes": int,
    "rollbacks": int,
    "seconds": float | int,
}
_RESTORED_ON_ROLLBACK = {"step": int, "targets": int, "recent_losses": list, "validation": dict | None}
_BEFORE_THEY_WERE_COUNTED = {"spikes": 0, "rollbacks": 0, "recent_losses": []}
"""Values for checkpoints of earlier versions, which did not have these."""

_ERROR_COUNTS = "state/difficulty"


@dataclass
class TrainingState:
    """Counters of the run, and fingerprints of its data. A skipped step advances the position in the data (`samples`),
    not the schedule (`step`)."""

    padded_vocab_size: int

    group_samples: int
    """Consecutive samples whose targets are candidates for each other (a candidate group), fixed when the run began."""

    step: int = 0
    """Optimizer steps that were applied."""

    samples: int = 0
    """Samples read by all data ranks together, which is also the next sample's number."""

    tokens: int = 0
    """Input tokens read by all data ranks together."""

    targets: int = 0
    """Targets trained on, since attention last changed its direction."""

    target_samples: int = 0
    """Samples that these targets came from: fewer than `samples` if steps were skipped or rolled back."""

    skipped_steps: int = 0
    """Steps whose samples were read but that were not applied: not finite, or a spike that was skipped."""

    spikes: int = 0
    """Steps whose loss was far above recent losses, applied or not."""

    rollbacks: int = 0
    """Returns to a checkpoint after a bad step."""

    seconds: float = 0.0
    """Time spent training, all sessions together."""

    recent_losses: list[float] = field(default_factory=list)
    """Losses of the last applied steps (`faults.spike_window` of them), with which spikes are found."""

    validation: dict[str, float] | None = None
    """`step` and `loss` of the last evaluation."""

    data_fingerprints: dict[str, Any] = field(default_factory=dict)
    """Identify the content of the files that the config names, see `identity`; in a checkpoint they are `texts`."""

    local_counts: Tensor = field(init=False)
    """int64 [padded vocabulary]: how often each id was one of these targets on this rank (rank 0's include the counts
    of the checkpoint that was resumed)."""

    error_counts: ErrorCounts | None = None
    """How often each id was missed, where masking follows that; goes with what was read, not with what was learned."""

    dataset_counts: Tensor = field(init=False)
    """int64 [padded vocabulary]: how often each id occurs in the training dataset; zeros if the dataset has no counts.
    Only used to smooth `local_counts` for ids that were seldom a target so far."""

    def __post_init__(self) -> None:
        self.local_counts = torch.zeros(self.padded_vocab_size, dtype=torch.int64)
        self.dataset_counts = torch.zeros(self.padded_vocab_size, dtype=torch.int64)

    def record_applied_step(self, samples: int, targets: int) -> None:
        """Counts an applied step over `samples` samples with `targets` targets."""
        self.step += 1
        self.target_samples += samples
        self.targets += targets

    def forget_targets(self) -> None:
        """Begins to count anew: from here on other tokens are targets, by which the training-free head is made."""
        self.targets = self.target_samples = 0
        self.local_counts.zero_()

    def count_targets(self, batch: Batch) -> None:
        """Adds a batch's targets to the counts."""
        ids_N = batch.target_ids_N
        self.local_counts.index_add_(0, ids_N, torch.ones_like(ids_N))

    def target_counts(self, group: Group) -> Tensor:
        """int64 [padded vocabulary]: counts over all ranks of `group` (CPU tensors). Collective."""
        return group.all_reduce_(self.local_counts.clone())

    def tensors(self, group: Group) -> dict[str, Tensor]:
        """What a checkpoint holds beside weights and optimizer. Collective over the data ranks."""
        counts = {"state/target_counts": self.target_counts(group), "state/dataset_counts": self.dataset_counts}
        return counts if self.error_counts is None else counts | {_ERROR_COUNTS: self.error_counts.state(group)}

    @property
    def evaluated(self) -> bool:
        """Whether the last evaluation was made with the present weights."""
        return self.validation is not None and self.validation.get("step") == self.step

    def group_targets(self, expected: int) -> float:
        """Mean number of targets in a candidate group so far; before the first step with `expected` ones per sample."""
        per_row = self.targets / self.target_samples if self.target_samples else expected
        return self.group_samples * per_row

    def counters(self) -> dict[str, Any]:
        """All counters except those per id, as written to a checkpoint's JSON."""
        names = (*_KEPT_ON_ROLLBACK, *_RESTORED_ON_ROLLBACK, "target_samples", "group_samples")
        counters = {name: copy(getattr(self, name)) for name in names}
        return counters | {"texts": copy(self.data_fingerprints)}

    def restore(self, checkpoint: Checkpoint, group: Group) -> None:
        """The inverse of `counters` and `tensors`: everything is as when `checkpoint` was saved."""
        self._take(_KEPT_ON_ROLLBACK, checkpoint)
        if self.error_counts is not None:
            self.error_counts.restore(checkpoint.read(_ERROR_COUNTS), self.samples, group)
        self.roll_back_to(checkpoint, group)

    def roll_back_to(self, checkpoint: Checkpoint, group: Group) -> None:
        """Restores the counters of what was learned from `checkpoint`; those of what was read stay as they are."""
        self._take(_RESTORED_ON_ROLLBACK, checkpoint)
        self.target_samples = target_samples(checkpoint)
        counts = checkpoint.read("state/target_counts")
        if counts.shape != self.local_counts.shape:
            raise CheckpointError(
                f"{checkpoint.folder} must count {len(self.local_counts)} ids, but has {tuple(counts.shape)} instead."
            )
        self.local_counts.copy_(counts if group.rank == 0 else torch.zeros_like(counts))

    def _take(self, kinds: Mapping[str, Any], checkpoint: Checkpoint) -> None:
        for name, kind in kinds.items():
            absent = _BEFORE_THEY_WERE_COUNTED.get(name)
            setattr(self, name, copy(checkpoint.state_value(name, kind, absent)))


@dataclass(frozen=True)
class CapturedCheckpoint:
    """One rank's part of a checkpoint, captured after a step and written while training goes on."""

    header: Header
    """Its name, the same on all ranks, and its parents; the counters and the settings of the phase."""

    snapshot: Snapshot

    def check_finite(self) -> None:
        """CheckpointError unless all numbers are finite, so that the newest checkpoint is always one to go back to.

        Measured: 0.08 s beside 1.7 s of writing (360 MiB, one thread).
        """
        bad = [name for name, tensor in self.snapshot.tensors.items() if not is_finite(tensor)]
        bad += [f"state/{name}" for name, value in self.header.state.items() if not all(map(isfinite, _floats(value)))]
        if bad:
            raise CheckpointError(
                f"a checkpoint must hold finite numbers only, but at step {self.header.step} {bad[0]} has others; it "
                "was not saved (older checkpoints are unharmed): clip gradients or lower optimizer.learning_rate, and "
                "resume."
            )


def _floats(value: Any) -> Iterator[float]:
    """All floats in a value of a checkpoint's JSON."""
    if isinstance(value, float):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _floats(part)


# Which checkpoints in a run's folder led to its present weights: not all, if it was resumed from an older one.


@dataclass
class RunHistory:
    """A run's folder of checkpoints, and those that led to its weights."""

    root: Path
    ancestry: Ancestry

    @staticmethod
    def after_resume(resumed: Checkpoint | None, folder: RunFolder, known: Sequence[str] = ()) -> RunHistory:
        """Of a session in the run folder `folder`; `resumed` may also be None or a checkpoint elsewhere. `known`: what
        is in other places."""
        disk = Disk(folder.checkpoints)
        run, all_known = RunHistory(disk.root, Ancestry()), (disk.names(), known)
        if resumed is None or not run.contains(resumed):
            return replace(run, ancestry=Ancestry.after(None, None, *all_known))
        return replace(run, ancestry=Ancestry.after(resumed.folder.name, resumed.manifest, *all_known))

    def name_of(self, checkpoint: Checkpoint) -> str:
        """Its folder's name if it is in `root`, else its full path."""
        return checkpoint.folder.name if self._has(checkpoint) else str(checkpoint.folder)

    def contains(self, checkpoint: Checkpoint) -> bool:
        """Whether it is one of the run's own, and was not set aside by an earlier version."""
        return self._has(checkpoint) and is_name(checkpoint.folder.name)

    def _has(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.folder.parent.resolve() == self.root.resolve()

    def last_common_step(self) -> int:
        """The last step that it has in common with the present history: up to there the run's log is of both."""
        there = history(Disk(self.root))
        return max((step_of(name) for name in there if is_ancestor(name, self.ancestry.parents)), default=0)

    def orphaned_by_next_save(self) -> list[str]:
        """Names of the checkpoints of the present history that the next save orphans."""
        return [name for name in history(Disk(self.root)) if not is_ancestor(name, self.ancestry.parents)]

    def folders(self) -> list[Path]:
        """What led to the run's weights and is there, the newest first."""
        return [self.root / name for name in ancestors_among(self.ancestry.parents, Disk(self.root).names())]


@dataclass(frozen=True)
class Progress:
    """Of a run in one of its phases. All methods are collective over `world_group`."""

    phase: Phase

    engine: Engine
    """Has weights, and what the optimizer knows of them."""

    state: TrainingState
    """All that is counted."""

    history: RunHistory
    """The checkpoints that led there."""

    data_group: Group
    """Data-parallel ranks, for CPU tensors."""

    world_group: Group
    """All ranks, for CPU tensors."""

    def capture(self, group: Group, *, copied: bool) -> CapturedCheckpoint:
        """The state after the last step, of which each rank of `group` will write a share. Training may go on before it
        is written if it is `copied`."""
        name = self.world_group.broadcast_object(new_name(self.state.step))
        tensors = chain(self.engine.tensors(), self.state.tensors(self.data_group).items())
        snapshot = Snapshot.take(tensors, group, copied=copied)
        of_engine = {"optimizer_steps": self.engine.optimizer_steps, "scale": self.engine.loss_scale.state()}
        counters = self.state.counters() | of_engine | {"phase_began": self.phase.steps.start}
        settings = self.phase.config.model_dump(mode="json")
        ancestry = self.history.ancestry
        return CapturedCheckpoint(
            Header(name, self.state.step, counters, settings, ancestry.parents, ancestry.orphaned), snapshot
        )

    def resume_from(self, checkpoint: Checkpoint) -> None:
        """Continues exactly where `checkpoint` was saved, by the objective of the phase."""
        self._load(checkpoint)
        self.state.restore(checkpoint, self.data_group)
        self._forget_another_phase(checkpoint)

    def roll_back(self) -> Path | None:
        """Restores weights and counters of what was learned from the newest valid checkpoint of its history; reading
        goes on with the next samples.

        Returns the checkpoint's folder; None where there is none that the phase went on from: nothing changes.
        """
        checkpoint, damage = first_valid(self.history.folders, self.world_group)
        if checkpoint is None:
            refuse_damaged(self.history.root, damage)
        if checkpoint is None or checkpoint.step < self.phase.steps.start:
            return None
        self._load(checkpoint)
        self.state.roll_back_to(checkpoint, self.data_group)
        self._forget_another_phase(checkpoint)
        self.history.ancestry.go_back(checkpoint.folder.name)
        return checkpoint.folder

    def _load(self, checkpoint: Checkpoint) -> None:
        self.engine.load(CheckpointWithHead(checkpoint), checkpoint.state_value("optimizer_steps", int))
        self.engine.loss_scale.restore(checkpoint.state_value("scale", dict, absent={}))

    def _forget_another_phase(self, checkpoint: Checkpoint) -> None:
        """Another phase's losses say nothing about spikes of this one's; nor do next tokens, counted as targets, say
        how often masked ones are targets."""
        saved, config = config_of(checkpoint), self.phase.config
        if not same_objective(saved, config):
            self.state.recent_losses.clear()
        if saved.model.is_causal != config.model.is_causal:
            self.state.forget_targets()
