"""Everything a run must remember beside its weights and optimizer: counters, and fingerprints of its data."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megahead.checkpoint import Checkpoint, target_samples
from megahead.data import Batch, Difficulty
from megahead.distributed import Group
from megahead.errors import CheckpointError

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

_DIFFICULTY = "state/difficulty"


@dataclass
class TrainingState:
    """Counters of the run. A skipped step advances the position in the data (`samples`), not the schedule (`step`)."""

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

    difficulty: Difficulty | None = None
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
        return counts if self.difficulty is None else counts | {_DIFFICULTY: self.difficulty.state(group)}

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
        if self.difficulty is not None:
            self.difficulty.restore(checkpoint.read(_DIFFICULTY), self.samples, group)
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
