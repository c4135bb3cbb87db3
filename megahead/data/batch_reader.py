"""Reads samples, given by their numbers, as a batch: next-token prediction for a decoder (of masked inputs, where asked
for), framed rows for an encoder, masked or (where it is causal) as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from megahead.config import DataConfig, MaskingConfig, RunConfig
from megahead.corpus.indexed import IndexedDataset
from megahead.data.batch import Batch, causal_batch
from megahead.data.difficulty import Difficulty
from megahead.data.diffusion import Diffusion
from megahead.data.dropping import TokenDropping
from megahead.data.framing import Framing
from megahead.data.masked_inputs import MaskedInputs
from megahead.data.masking import Masker
from megahead.data.nearest_ids import open_nearest_ids
from megahead.data.next_tokens import NextTokens
from megahead.data.replacing import Replacing
from megahead.data.sampling import RowSource
from megahead.data.strategies import STRATEGIES, TrainingText, Uniform
from megahead.errors import ConfigError


class RowMasker(Protocol):
    """Makes batches that are no plain rows of text: framed ones, or some of whose inputs are masked."""

    def batch(
        self,
        rows: np.ndarray[Any, Any],
        sample_indices: Sequence[int],
        document_starts: np.ndarray[Any, Any] | None = None,
        /,
    ) -> Batch:
        """The batch of a `RowSource`'s rows, int64 [B, t], and its `document_starts`, bool [B, t]."""
        ...


@dataclass(frozen=True)
class BatchReader:
    """Reads batches, which depend on nothing but the samples' numbers."""

    samples: RowSource
    data: DataConfig
    masker: RowMasker | None = None
    """None for next-token prediction from whole rows."""

    def read(self, sample_indices: Sequence[int]) -> Batch:
        """The batch of these samples, in their order."""
        rows, document_starts = self.samples.rows(sample_indices), self.samples.document_starts(sample_indices)
        if self.masker is not None:
            return self.masker.batch(rows, sample_indices, document_starts)
        return causal_batch(
            rows,
            document_starts,
            end_token=self.data.end_token,
            isolate_documents=self.data.isolate_documents,
            boundary_targets=self.data.boundary_targets,
        )


def training_masker(
    config: RunConfig,
    datasets: Sequence[IndexedDataset],
    difficulty: Difficulty | None = None,
    masked_from: int = 0,
) -> RowMasker | None:
    """How a run, or a phase of it, frames and masks its training samples; None for a decoder that reads whole rows.
    `masked_from`: how many of the run's steps come before the first one that masks.

    ConfigError if `datasets` lack the token counts that the strategy needs, or have a decoder's mask token in their
    text. Some strategies read the text to count pairs of neighbouring tokens; `difficulty` is for those that adapt.
    """
    if config.masked_inputs is not None:
        _refuse_in_text(config.masked_inputs.mask_token, datasets)
        return MaskedInputs(config.masked_inputs, config.data, config.seed)
    if config.masking is None:
        return None
    if config.model.is_causal:
        return _next_tokens(config.masking, config.data)
    text = TrainingText(config, datasets, "masking.strategy", difficulty)
    if config.masking.diffusion:
        strategy = STRATEGIES[config.masking.strategy](config.masking, text)
        return Diffusion(_framing(config.masking, config.data), config.seed, strategy)
    masker = _masker(config, config.masking, text, masked_from)
    return masker if config.generator() is None else Replacing(masker, config.seed)


def _masker(config: RunConfig, masking: MaskingConfig, text: TrainingText, masked_from: int) -> Masker:
    """Of an encoder whose rows are masked at the rate that is asked for."""
    framing = _framing(masking, config.data)
    nearest = config.data.nearest_ids if masking.similar_share else None
    return Masker(
        framing,
        STRATEGIES[masking.strategy](masking, text),
        config.model.vocab_size,
        config.seed,
        samples_per_step=config.batch.global_size,
        steps=config.training.steps,
        masked_from=masked_from,
        nearest_VK=None if nearest is None else open_nearest_ids(nearest, config.model.vocab_size),
        masks_from=masking.masks_from(config.model),
        dropping=_dropping(framing, replace(text, setting="masking.dropping.by")),
        phrases=config.objective.phrases,
    )


def _dropping(framing: Framing, text: TrainingText) -> TokenDropping | None:
    asked = framing.masking.dropping
    if asked is None:
        return None
    return TokenDropping.of(asked, text.config.model, framing, STRATEGIES[asked.by](framing.masking, text))


def _next_tokens(masking: MaskingConfig, data: DataConfig) -> NextTokens:
    return NextTokens(_framing(masking, data), data.boundary_targets)


def _refuse_in_text(mask_token: int, datasets: Sequence[IndexedDataset]) -> None:
    """ConfigError if a dataset is known to have the token: it would stand for itself and for all others."""
    for dataset in datasets:
        counts = () if dataset.info is None else dataset.info.token_counts
        if mask_token < len(counts) and counts[mask_token]:
            rule = f"be an id that {dataset.prefix} does not have"
            hint = "take the tokenizer's mask token, or raise model.vocab_size by one for an id of its own"
            got = f"{mask_token} ({counts[mask_token]:,} times)"
            raise ConfigError("masked_inputs.mask_token", rule, got=got, hint=hint)


def evaluation_target_counts(config: RunConfig, token_counts_V: Tensor | None) -> Tensor | None:
    """int64 [V]: how often each id would be a target if the training text were masked as held-out rows are (every token
    with the same probability); None if training does so too, or masks nothing, or `token_counts_V` are not
    known (all 0)."""
    if config.masking is None or config.model.is_causal:
        return None
    weighs_ids = config.masking.weighs_ids() or config.objective.phrases is not None
    if not weighs_ids or token_counts_V is None or not token_counts_V.any():
        return None
    special = config.masking.never_masked(config.data.end_token)
    counts_V = token_counts_V[: config.model.vocab_size].clone()
    counts_V[[id_ for id_ in special if id_ < len(counts_V)]] = 0
    return counts_V


def held_out_masker(config: RunConfig) -> RowMasker | None:
    """How held-out rows are framed and masked: the same in every run with the same rows, but for masked diffusion,
    whose rows are masked as in training. None for a decoder."""
    if config.masking is None:
        return None
    if config.model.is_causal:
        return _next_tokens(config.masking, config.data)
    framing = _framing(config.masking.held_out(), config.data)
    if config.masking.diffusion:
        return Diffusion(framing, seed=0)
    masks_from = config.masking.masks_from(config.model)
    masker = Masker(framing, Uniform(), config.model.vocab_size, seed=0, masks_from=masks_from)
    return masker if config.generator() is None else Replacing(masker, seed=0)


def _framing(masking: MaskingConfig, data: DataConfig) -> Framing:
    return Framing(masking, data.end_token, data.isolate_documents)
