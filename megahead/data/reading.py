"""Samples by number as batches: next-token prediction for a decoder, masked rows for an encoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megahead.config import DataConfig, RunConfig
from megahead.data.batch import Batch, causal_batch
from megahead.data.masking import Masker
from megahead.data.strategies import Uniform
from megahead.data.training import SampleRows


@dataclass(frozen=True)
class BatchReader:
    """Reads batches; a pure function of the samples' numbers."""

    samples: SampleRows
    data: DataConfig
    masker: Masker | None = None
    """None: each token predicts the next."""

    def read(self, sample_indices: Sequence[int]) -> Batch:
        """The batch of these samples, in their order."""
        rows = self.samples.rows(sample_indices)
        if self.masker is not None:
            return self.masker.batch(rows, sample_indices)
        return causal_batch(
            rows,
            end_token=self.data.end_token,
            isolate_documents=self.data.isolate_documents,
            boundary_targets=self.data.boundary_targets,
        )


def training_masker(config: RunConfig) -> Masker | None:
    """How a run masks what it trains on; None for a decoder."""
    if config.masking is None:
        return None
    return Masker(
        config.masking,
        Uniform(),
        config.model.vocab_size,
        config.data.end_token,
        config.data.isolate_documents,
        config.seed,
        samples_a_step=config.batch.global_size,
        steps=config.training.steps,
    )


def held_out_masker(config: RunConfig) -> Masker | None:
    """How held-out rows are masked, the same for every run on the same rows; None for a decoder."""
    if config.masking is None:
        return None
    data = config.data
    return Masker(
        config.masking.held_out(), Uniform(), config.model.vocab_size, data.end_token, data.isolate_documents, seed=0
    )
