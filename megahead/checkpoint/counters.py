"""Counters of a run that its earlier checkpoints do not state, as far as these tell."""

from __future__ import annotations

from megahead.checkpoint.reading import Checkpoint


def target_samples(checkpoint: Checkpoint) -> int:
    """Samples that the checkpoint's `targets` came from: those of steps that were applied and not taken back.

    Where they were not counted yet, as many as its steps have by its settings.
    """
    batch = checkpoint.config.get("batch")
    rows = batch.get("global_size") if isinstance(batch, dict) else None
    absent = checkpoint.step * rows if isinstance(rows, int) else None
    samples: int = checkpoint.state_value("target_samples", int, absent)
    return samples
