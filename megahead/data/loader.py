"""Reads samples by their numbers as batches, and checks the end tokens that they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megahead.config.data import DataConfig
from megahead.config.run import RunConfig
from megahead.data.batch import Batch, CausalRows, RowCollator
from megahead.data.blending import RowSource
from megahead.data.framing import Framing, MaskedInputs, NextTokens
from megahead.data.indexed import IndexedDataset
from megahead.data.masking import Diffusion, MaskingCollator
from megahead.data.strategies import Uniform, build_strategy
from megahead.data.strategy import ErrorCounts, TrainingText
from megahead.data.token_subsets import TokenSubsets
from megahead.errors import ConfigError


@dataclass(frozen=True)
class BatchReader:
    """Reads batches, which depend on nothing but the samples' numbers."""

    samples: RowSource
    data: DataConfig
    collator: RowCollator | None = None
    """None for next-token prediction from whole rows."""

    def read(self, sample_indices: Sequence[int]) -> Batch:
        """The batch of these samples, in their order."""
        rows, document_starts = self.samples.rows(sample_indices), self.samples.document_starts(sample_indices)
        collator = self.collator or CausalRows(self.data)
        return collator.batch(rows, sample_indices, document_starts)


def training_collator(
    config: RunConfig,
    datasets: Sequence[IndexedDataset],
    error_counts: ErrorCounts | None = None,
    steps_before_masking: int = 0,
) -> RowCollator:
    """The collator of the training samples of a run, or of a phase. `steps_before_masking`: steps of the run before the
    first that masks.

    ConfigError if `datasets` lack the token counts that the strategy needs, or have a decoder's mask token in their
    text. Some strategies read the text to count bigrams; `error_counts` is for those that adapt.
    """
    if config.masked_inputs is not None:
        _refuse_in_text(config.masked_inputs.mask_token, datasets)
        return MaskedInputs(config.masked_inputs, config.data, config.seed)
    return _collator(config, TrainingText(config, datasets, "masking.strategy", error_counts), steps_before_masking)


def held_out_collator(config: RunConfig) -> RowCollator:
    """The collator of held-out rows. It masks equal rows alike in every run, but for masked diffusion, whose rows are
    masked as in training."""
    return _collator(config)


def _collator(config: RunConfig, text: TrainingText | None = None, steps_before_masking: int = 0) -> RowCollator:
    """`text`: that of a run; None for held-out rows, of which single tokens are masked by the same seed everywhere."""
    if config.masking is None:
        return CausalRows(config.data)
    masking = config.masking.for_evaluation() if text is None else config.masking
    framing = Framing(masking, config.data.end_token, config.data.isolate_documents)
    if config.model.is_causal:
        return NextTokens(framing, config.data.boundary_targets)
    strategy, seed = (Uniform(), 0) if text is None else (build_strategy(masking, text), config.seed)
    if masking.diffusion:
        return Diffusion(framing, seed, strategy)
    return MaskingCollator(
        framing,
        strategy,
        config.model.vocab_size,
        seed,
        samples_per_step=config.batch.global_size,
        steps=config.training.steps,
        steps_before_masking=steps_before_masking,
        subsets=TokenSubsets.from_settings(framing, config.model, text),
    )


def _refuse_in_text(mask_token: int, datasets: Sequence[IndexedDataset]) -> None:
    """ConfigError if a dataset is known to have the token: it would stand for itself and for all others."""
    for dataset in datasets:
        counts = () if dataset.info is None else dataset.info.token_counts
        if mask_token < len(counts) and counts[mask_token]:
            rule = f"be an id that {dataset.prefix} does not have"
            hint = "take the tokenizer's mask token, or raise model.vocab_size by one for an id of its own"
            got = f"{mask_token} ({counts[mask_token]:,} times)"
            raise ConfigError("masked_inputs.mask_token", rule, got=got, hint=hint)


# Checks that the config's end token is the one that closes the documents. With a wrong id nothing would fail, but
# documents in one row would attend to each other.

NUM_CHECKED = 64
"""How many documents or rows are checked, evenly spread over the dataset."""


def require_end_tokens(data: DataConfig, dataset: IndexedDataset, *, boundaries_known: bool = False) -> None:
    """ConfigError if `data` needs to know where documents end, but its end token does not close them.

    boundaries_known: rows come with the boundaries of their documents (`pack: best_fit`). Reads the counts in
    PREFIX.json, and the first and last tokens of a few documents.
    """
    needed = data.isolate_documents or not data.boundary_targets
    flaw = None if boundaries_known or not needed else _flaw(dataset, data.end_token)
    if flaw is not None:
        raise ConfigError(
            "data.end_token",
            f"be the id that closes the documents of {dataset.prefix}",
            got=f"{data.end_token} ({flaw})",
            hint="set it to theirs (`megahead inspect-dataset` shows them), or leave documents unseparated "
            "(isolate_documents: false, boundary_targets: true)",
        )


def lacks_document_boundaries(data: DataConfig, dataset: IndexedDataset) -> bool:
    """Whether `data` isolates documents, but the dataset shows no boundaries: it has preshuffled rows, whose index
    lists no documents, and none of the rows that were checked has an end token."""
    if dataset.num_documents or not data.isolate_documents:
        return False
    return not any((dataset[i] == data.end_token).any() for i in _spread(len(dataset)))


def _flaw(dataset: IndexedDataset, end_token: int) -> str | None:
    """Why `end_token` cannot be right, in words; None if it may be right."""
    info = dataset.info
    if info is not None and dataset.num_documents:
        ends = info.token_counts[end_token] if end_token < len(info.token_counts) else 0
        if ends < info.documents:
            documents = int((np.diff(dataset.document_boundaries()) > 0).sum())  # an empty one needs no end
            if ends < documents:
                return f"it occurs {ends:,} times in {documents:,} documents"
    texts = [text for text in map(dataset.document, _spread(dataset.num_documents)) if len(text)]
    open_ = sum(end_token not in (text[0], text[-1]) for text in texts)  # some tools put it before each document
    return f"{open_} of {len(texts)} documents that were checked neither end nor begin with it" if open_ else None


def _spread(count: int) -> list[int]:
    """Up to NUM_CHECKED numbers below `count`, evenly spread, the first and the last among them."""
    return sorted(set(np.linspace(0, count - 1, min(count, NUM_CHECKED)).astype(int).tolist())) if count else []
