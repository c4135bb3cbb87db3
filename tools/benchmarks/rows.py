"""Rows, micro-batches and the objective of benchmarks: real tokens where there is a dataset, else by Zipf's law."""

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
from megahead.data.batch import RowCollator
from megahead.data.blending import RowSource, training_samples
from megahead.data.framing import Framing
from megahead.data.indexed import IndexedDataset
from megahead.data.loader import BatchReader
from megahead.data.masking import MaskingCollator
from megahead.data.strategies import Uniform
from megahead.data.token_subsets import TokenDropping, TokenSubsets
from megahead.distributed.group import Group
from megahead.losses.contrastive import Objective, build_objective
from megahead.objectives.auxiliary import auxiliary_kind, training_rows, with_auxiliary
from megahead.objectives.loader import StepBatches, StepLoader
from megahead.objectives.micro_batch import MicroBatch


def changed(config: RunConfig, *overrides: str) -> RunConfig:
    """`config` with other settings."""
    return config_from_dict(config.model_dump(mode="json"), config.name, overrides)


def token_rows(config: RunConfig, prefix: str | None, count: int) -> list[np.ndarray[Any, Any]]:
    """`count` micro-batches of rows, int64 [B, T+1]; [B, T-2] for an encoder, whose rows are framed later."""
    size, length = config.batch.micro_size, config.sample_length()
    prefix = prefix or config.data.parts()[0].prefix
    if prefix:
        data = config.data.model_copy(update={"train": prefix})
        samples = training_samples(data, [IndexedDataset(prefix)], config.seed, length)
        return [samples.rows(range(k * size, (k + 1) * size)) for k in range(count)]
    ends = config.data.end_token  # rows are one document each
    return list(zipf_tokens(config.model.vocab_size, (count, size, length + 1), config.seed, without=ends))


def micro_batch(config: RunConfig, rule: Objective, rows: np.ndarray[Any, Any]) -> MicroBatch:
    """`rows` with their candidates, which are not padded, as the only micro-batch of its step."""
    batch = BatchReader(_Given(rows), config.data, _collator(config)).read(range(len(rows)))
    candidates = rule.candidate_set(batch.target_ids_N).candidates(batch.target_ids_N, batch.weight_N)
    settings = config.objective.auxiliary()
    others = None if settings is None else auxiliary_kind(settings).counted(batch)
    return MicroBatch(batch, (candidates,), 1 / batch.total_weight(), None if others is None else 1 / max(others, 1))


def step_batches(
    config: RunConfig, rule: Objective, rows: Sequence[np.ndarray[Any, Any]], device: torch.device
) -> StepBatches:
    """Micro-batches of rows as those of one step, as a run's loader prepares them on one rank."""
    group_samples = resolve_candidate_group_samples(config.objective, config.batch, data_ranks=1)
    settings = config.objective.auxiliary()
    loader = StepLoader(
        _Given(np.concatenate(rows)),
        rule,
        config.data,
        config.batch,
        Group(),
        group_samples=group_samples,
        device=device,
        half=config.engine.precision != "fp32",
        collator=_collator(config),
        counted=None if settings is None else auxiliary_kind(settings).counted,
    )
    return loader.step(0)


def _collator(config: RunConfig) -> RowCollator:
    """As a run frames and masks, but for which tokens it selects and keeps: that costs a step nothing."""
    if config.masking is None or config.model.is_causal or config.masking.diffusion:
        return training_rows(config, [])
    framing = Framing(config.masking, config.data.end_token, config.data.isolate_documents)
    asked, late = config.masking.dropping, config.masking.first_masked_layer(config.model)
    dropping = (
        None if asked is None else TokenDropping(framing, asked.layers(config.model), asked.keep_share, Uniform())
    )
    subsets = TokenSubsets(config.masking.mask_token, late, dropping)
    collator = MaskingCollator(framing, Uniform(), config.model.vocab_size, seed=0, subsets=subsets)
    return with_auxiliary(collator, config, seed=0)


@dataclass(frozen=True)
class _Given(RowSource):
    """Rows at hand, by number."""

    given: np.ndarray[Any, Any]

    def rows(self, sample_indices: Sequence[int] | np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        rows: np.ndarray[Any, Any] = self.given[np.asarray(sample_indices)]
        return rows


def rule_of(config: RunConfig, rows: Sequence[np.ndarray[Any, Any]]) -> Objective:
    """The config's; ids are counted in `rows`, int64 with -1 for padding, where it asks how often each is there."""
    objective, size, counts_V = config.objective, config.model.vocab_size, None
    if objective.token_counts_needed_by():
        ids = np.concatenate([each.reshape(-1) for each in rows])
        counts_V = torch.from_numpy(np.bincount(ids[ids >= 0], minlength=size))
    return build_objective(objective, size, counts_V)
