"""Rows, micro-batches and the objective of the benchmarks: tokens of a dataset, or else Zipf-distributed ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.command import zipf_tokens
from megahead.config.loading import config_from_dict
from megahead.config.objective import resolve_candidate_group_samples
from megahead.config.run import RunConfig
from megahead.data.batch import EncoderRowBuilder, RowCollator
from megahead.data.indexed import IndexedDataset
from megahead.data.loader import BatchReader, training_samples
from megahead.data.masking import MaskingCollator, TokenSubsets
from megahead.data.samples import RowSource
from megahead.data.strategies import Uniform
from megahead.distributed.group import Group
from megahead.losses.contrastive import Objective, build_objective
from megahead.objectives.auxiliary import add_auxiliary, auxiliary_class, training_row_collator
from megahead.objectives.loader import StepBatches, StepLoader
from megahead.objectives.micro_batch import MicroBatch


def with_overrides(config: RunConfig, *overrides: str) -> RunConfig:
    """Returns `config` with the overrides `a.b=c` applied."""
    return config_from_dict(config.model_dump(mode="json"), config.name, overrides)


def token_rows(config: RunConfig, prefix: str | None, count: int) -> list[np.ndarray[Any, Any]]:
    """`count` micro-batches of rows, int64 [B, T+1]; [B, T-2] for an encoder, without special tokens."""
    size, length = config.batch.micro_size, config.sample_length()
    prefix = prefix or config.data.parts()[0].prefix
    if prefix:
        data = config.data.model_copy(update={"train": prefix})
        samples = training_samples(data, [IndexedDataset(prefix)], config.seed, length)
        return [samples.read(range(k * size, (k + 1) * size))[0] for k in range(count)]
    end_token = config.data.end_token  # a row is one document
    return list(zipf_tokens(config.model.vocab_size, (count, size, length + 1), config.seed, excluded_id=end_token))


def micro_batch(config: RunConfig, objective: Objective, rows: np.ndarray[Any, Any]) -> MicroBatch:
    """Returns `rows` as the only micro-batch of a step, with unpadded candidates."""
    batch = BatchReader(_InMemoryRows(rows), _collator(config)).read(range(len(rows)))
    candidates = objective.candidate_set(batch.target_ids_N).candidates(batch.target_ids_N, batch.weight_N)
    auxiliary = auxiliary_class(config.objective.auxiliary_or_empty())
    count, own = auxiliary.num_loss_terms(batch), auxiliary.targets(batch)
    own_candidates = () if own is None else (objective.candidate_set(own.ids_P).candidates(own.ids_P),)
    auxiliary_weight = None if count is None else 1 / max(count, 1)
    return MicroBatch(batch, (candidates,), 1 / batch.total_weight(), auxiliary_weight, own_candidates)


def step_batches(
    config: RunConfig, objective: Objective, rows: Sequence[np.ndarray[Any, Any]], device: torch.device
) -> StepBatches:
    """The micro-batches of one step, prepared by the loader of a run on one rank; an array of `rows` for each."""
    group_samples = resolve_candidate_group_samples(config.objective, config.batch, data_ranks=1)
    loader = StepLoader(
        _InMemoryRows(np.concatenate(rows)),
        objective,
        config.data,
        config.batch,
        Group(),
        group_samples=group_samples,
        device=device,
        half_precision=config.engine.precision != "fp32",
        collator=_collator(config),
        auxiliary=auxiliary_class(config.objective.auxiliary_or_empty()),
    )
    return loader.step(0)


def _collator(config: RunConfig) -> RowCollator:
    """Adds special tokens and masks as a run does, but masks and keeps tokens uniformly: a step takes the same time."""
    if config.masking is None or config.model.is_causal or config.masking.diffusion:
        return training_row_collator(config, [])
    row_builder = EncoderRowBuilder(config.masking, config.data.end_token, config.data.isolate_documents)
    subsets = TokenSubsets(row_builder, config.model, Uniform())
    collator = MaskingCollator(row_builder, Uniform(), config.model.vocab_size, seed=0, subsets=subsets)
    return add_auxiliary(collator, config, seed=0)


@dataclass(frozen=True)
class _InMemoryRows(RowSource):
    """A row source over an array."""

    array: np.ndarray[Any, Any]

    def read(self, sample_indices: Sequence[int] | np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], None]:
        return self.array[np.asarray(sample_indices)], None


def build_run_objective(config: RunConfig, rows: Sequence[np.ndarray[Any, Any]]) -> Objective:
    """The config's objective; token counts, if it needs them, are those of `rows` (int64, -1 is padding)."""
    settings, vocab_size, counts_V = config.objective, config.model.vocab_size, None
    if settings.token_counts_needed_by():
        ids = np.concatenate([array.reshape(-1) for array in rows])
        counts_V = torch.from_numpy(np.bincount(ids[ids >= 0], minlength=vocab_size))
    return build_objective(settings, vocab_size, counts_V)
