"""Counters that earlier versions did not write, worked out from what their checkpoints have."""

from __future__ import annotations

from megahead.checkpoint.reading import Checkpoint


def target_samples(checkpoint: Checkpoint) -> int:
    """Samples that the checkpoint's `targets` came from: those of steps that were applied and not rolled back.

    Where they were not counted yet: the checkpoint's step times its `batch.global_size`.
    """
    batch = checkpoint.config.get("batch")
    rows = batch.get("global_size") if isinstance(batch, dict) else None
    absent = checkpoint.step * rows if isinstance(rows, int) else None
    samples: int = checkpoint.state_value("target_samples", int, absent)
    return samples
