"""Everything a run must remember beside its weights and optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megahead.data import Batch, IndexedDataset
from megahead.distributed import Group

_COUNTERS = ("step", "samples", "tokens", "targets", "skipped_steps", "seconds")


@dataclass
class TrainingState:
    """Counters of the run. The schedule (`step`) and the cursor in the data (`samples`) are kept apart: a step that
    was skipped moves the cursor but not the schedule."""

    padded_vocab_size: int

    group_samples: int
    """Samples that share candidates, settled when the run began."""

    step: int = 0
    """Optimizer steps that were applied."""

    samples: int = 0
    """Rows read, over all ranks: the next row's number."""

    tokens: int = 0
    """Input tokens read, over all data ranks, each once."""

    targets: int = 0
    """Targets trained on."""

    skipped_steps: int = 0
    """Steps whose gradients were not finite: read, but not applied."""

    seconds: float = 0.0
    """Time spent training, all sessions together."""

    local_counts: Tensor = field(init=False)
    """int64 [padded vocabulary]: how often each id was a target on this rank (what was resumed lies with rank 0)."""

    dataset_counts: Tensor = field(init=False)
    """int64 [padded vocabulary]: how often each id stands in the training dataset; zeros where it does not know.
    Only smooths what `local_counts` says of ids that were seldom a target yet."""

    def __post_init__(self) -> None:
        self.local_counts = torch.zeros(self.padded_vocab_size, dtype=torch.int64)
        self.dataset_counts = torch.zeros(self.padded_vocab_size, dtype=torch.int64)

    def note_dataset(self, dataset: IndexedDataset, passes: float) -> None:
        """Adds the dataset's own token counts, where it has them; `passes`: how often it is read, relatively."""
        if dataset.info is not None:
            counts = torch.tensor(dataset.info.token_counts)
            self.dataset_counts[: len(counts)] += (counts * passes).ceil().long()

    def count(self, batch: Batch) -> None:
        """Adds a batch's targets to the counts."""
        ids_N = batch.target_ids_N
        self.local_counts.index_add_(0, ids_N, torch.ones_like(ids_N))

    def target_counts(self, group: Group) -> Tensor:
        """int64 [padded vocabulary]: counts over all ranks of `group` (CPU tensors). Collective."""
        return group.sum_(self.local_counts.clone())

    def group_targets(self) -> float:
        """Targets of a group, on average so far."""
        return self.group_samples * self.targets / max(self.samples, 1)

    def counters(self) -> dict[str, Any]:
        """The counters, and the size of a group, as they stand in a checkpoint's JSON."""
        return {name: getattr(self, name) for name in (*_COUNTERS, "group_samples")}

    def restore(self, counters: dict[str, Any], target_counts: Tensor, group: Group) -> None:
        """The inverse of `counters` and `target_counts`."""
        for name in _COUNTERS:
            setattr(self, name, counters[name])
        self.local_counts.copy_(target_counts if group.rank == 0 else torch.zeros_like(target_counts))
