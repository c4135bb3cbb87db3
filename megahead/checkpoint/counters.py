"""Counters that earlier versions did not write, computed from what their checkpoints hold."""

from __future__ import annotations

from megahead.checkpoint.reading import Checkpoint


def target_samples(checkpoint: Checkpoint) -> int:
    """Samples whose targets the checkpoint's `targets` counts: those of steps that were applied and not rolled back.

    For checkpoints without this counter: their step times `batch.global_size`.
    """
    batch = checkpoint.config.get("batch")
    rows = batch.get("global_size") if isinstance(batch, dict) else None
    absent = checkpoint.step * rows if isinstance(rows, int) else None
    samples: int = checkpoint.state_value("target_samples", int, absent)
    return samples
