"""Reads samples as batches, and checks the end tokens that batches need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megahead.config.data import DataConfig
from megahead.config.run import RunConfig
from megahead.data.batch import (
    Batch,
    CausalCollator,
    EncoderRowBuilder,
    MaskedInputCollator,
    NextTokenCollator,
    RowCollator,
)
from megahead.data.indexed import IndexedDataset
from megahead.data.masking import DiffusionCollator, MaskingCollator, TokenSubsets
from megahead.data.samples import RowSource
from megahead.data.strategies import Uniform, build_strategy
from megahead.data.strategy import TargetErrorCounts, TrainingText
from megahead.errors import ConfigError


@dataclass(frozen=True)
class BatchReader:
    """Reads batches by the numbers of their samples, on which alone they depend."""

    samples: RowSource
    collator: RowCollator

    def read(self, sample_indices: Sequence[int]) -> Batch:
        """The batch of these samples, in their order."""
        rows, document_starts = self.samples.rows(sample_indices), self.samples.document_starts(sample_indices)
        return self.collator.batch(rows, sample_indices, document_starts)


def training_collator(
    config: RunConfig,
    datasets: Sequence[IndexedDataset],
    target_error_counts: TargetErrorCounts | None = None,
    steps_before_masking: int = 0,
) -> RowCollator:
    """The collator of the training samples of a run, or of a phase. `steps_before_masking`: steps of the run before the
    first that masks.

    ConfigError if `datasets` lack the token counts that the strategy needs, or have a decoder's mask token in their
    text. Some strategies read the text to count bigrams; `target_error_counts` is for those that adapt.
    """
    if config.masked_inputs is not None:
        _require_absent(config.masked_inputs.mask_token, datasets)
        return MaskedInputCollator(config.masked_inputs, config.data, config.seed)
    text = TrainingText(config, datasets, "masking.strategy", target_error_counts)
    return _make_collator(config, text, steps_before_masking)


def held_out_collator(config: RunConfig) -> RowCollator:
    """The collator of held-out rows. It masks equal rows alike in every run, but for masked diffusion, whose rows are
    masked as in training."""
    return _make_collator(config)


def _make_collator(config: RunConfig, text: TrainingText | None = None, steps_before_masking: int = 0) -> RowCollator:
    """`text`: the run's training text; None for held-out rows, whose single tokens every run masks with seed 0."""
    if config.masking is None:
        return CausalCollator(config.data)
    masking = config.masking.for_evaluation() if text is None else config.masking
    row_builder = EncoderRowBuilder(masking, config.data.end_token, config.data.isolate_documents)
    if config.model.is_causal:
        return NextTokenCollator(row_builder, config.data.boundary_targets)
    strategy, seed = (Uniform(), 0) if text is None else (build_strategy(masking, text), config.seed)
    if masking.diffusion:
        return DiffusionCollator(row_builder, seed, strategy)
    return MaskingCollator(
        row_builder,
        strategy,
        config.model.vocab_size,
        seed,
        samples_per_step=config.batch.global_size,
        steps=config.training.steps,
        steps_before_masking=steps_before_masking,
        subsets=TokenSubsets.from_settings(row_builder, config.model, text),
    )


def _require_absent(mask_token: int, datasets: Sequence[IndexedDataset]) -> None:
    """ConfigError if a dataset is known to contain the token: masked inputs would look like text."""
    for dataset in datasets:
        counts = () if dataset.info is None else dataset.info.token_counts
        if mask_token < len(counts) and counts[mask_token]:
            rule = f"be an id that {dataset.prefix} does not have"
            hint = "take the tokenizer's mask token, or raise model.vocab_size by one for an id of its own"
            got = f"{mask_token} ({counts[mask_token]:,} times)"
            raise ConfigError("masked_inputs.mask_token", rule, got=got, hint=hint)


# Checks that the config's end token closes the documents. With another id nothing would fail, but documents in one row
# would attend to each other.

NUM_PROBES = 64
"""Documents or rows that are checked, evenly spaced over the dataset."""


def require_end_tokens(data: DataConfig, dataset: IndexedDataset, *, boundaries_known: bool = False) -> None:
    """ConfigError if `data` needs the ends of documents, but its end token does not close them.

    boundaries_known: rows come with the boundaries of their documents (`pack: best_fit`). Reads the counts in
    PREFIX.json, and the first and last tokens of a few documents.
    """
    needs_ends = data.isolate_documents or not data.boundary_targets
    problem = None if boundaries_known or not needs_ends else _find_problem(dataset, data.end_token)
    if problem is not None:
        raise ConfigError(
            "data.end_token",
            f"be the id that closes the documents of {dataset.prefix}",
            got=f"{data.end_token} ({problem})",
            hint="set it to theirs (`megahead inspect-dataset` shows them), or leave documents unseparated "
            "(isolate_documents: false, boundary_targets: true)",
        )


def lacks_document_boundaries(data: DataConfig, dataset: IndexedDataset) -> bool:
    """Whether `data` isolates documents, but the dataset has no boundaries: its index lists no documents (preshuffled
    rows), and none of the rows that are checked has an end token."""
    if dataset.num_documents or not data.isolate_documents:
        return False
    return not any((dataset[i] == data.end_token).any() for i in _evenly_spaced(len(dataset)))


def _find_problem(dataset: IndexedDataset, end_token: int) -> str | None:
    """Why `end_token` cannot be right; None if it may be right."""
    info = dataset.info
    if info is not None and dataset.num_documents:
        ends = info.token_counts[end_token] if end_token < len(info.token_counts) else 0
        if ends < info.documents:
            documents = int((np.diff(dataset.document_boundaries()) > 0).sum())  # an empty one needs no end
            if ends < documents:
                return f"it occurs {ends:,} times in {documents:,} documents"
    texts = [text for text in map(dataset.document, _evenly_spaced(dataset.num_documents)) if len(text)]
    without = sum(end_token not in (text[0], text[-1]) for text in texts)  # some tools put it before each document
    return f"{without} of {len(texts)} documents that were checked neither end nor begin with it" if without else None


def _evenly_spaced(count: int) -> list[int]:
    """Up to NUM_PROBES numbers below `count`, evenly spaced, the first and the last among them."""
    return sorted(set(np.linspace(0, count - 1, min(count, NUM_PROBES)).astype(int).tolist())) if count else []
