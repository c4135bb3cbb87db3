"""A run's samples, of one dataset or of several in fixed proportions, and the batches that are read of them."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from megahead.config.data import DataConfig
from megahead.config.run import RunConfig
from megahead.data.batch import (
    Batch,
    CausalCollator,
    CausalEncoderCollator,
    EncoderRowBuilder,
    MaskedInputCollator,
    RowCollator,
)
from megahead.data.indexed import Array, IndexedDataset
from megahead.data.masking import DiffusionCollator, MaskingCollator, TokenSubsets
from megahead.data.samples import (
    DATASET_SEED,
    ConcatenatedSamples,
    PackedSamples,
    RowSource,
    SampleIndices,
    Samples,
    StoredSamples,
    derive_seed,
    pack_table,
)
from megahead.data.strategies import STRATEGIES, Uniform, build_strategy
from megahead.data.strategy import TargetErrorCounts, TrainingText
from megahead.errors import ConfigError
from megahead.wording import pluralize

# Several datasets in fixed proportions: which of them sample k comes from, and which of its samples it is. Proportions
# are rounded to whole samples of a period of P samples, and every period has the same schedule. If a dataset has n
# samples in it, its j-th sample may not come before position floor(j P / n) and must come before ceil((j + 1) P / n).
# Each position takes, among the samples that may come, the one with the earliest deadline (Tijdeman 1980, "The chairman
# assignment problem"). So among any first k samples each dataset has its share k n / P, to within one sample.

PERIOD = 65_536


class Blend(RowSource):
    """Samples of several datasets, numbered from 0 without end; those of each dataset come in that dataset's order."""

    def __init__(self, parts: Sequence[Samples], weights: Sequence[float]) -> None:
        self.parts = list(parts)
        self.requested_shares = np.asarray(weights, np.float64) / np.sum(weights)
        self.quotas = round_shares(self.requested_shares, PERIOD)
        self.sequence_length = parts[0].sequence_length
        self._part_P, self._ordinal_P = build_schedule(self.quotas)

    def read(self, sample_indices: SampleIndices) -> tuple[Array, Array]:
        """As `RowSource.read`."""
        part_B, index_B = self.locate(np.asarray(sample_indices, np.int64))
        rows = np.empty((len(part_B), self.sequence_length + 1), np.int64)
        document_starts = np.empty(rows.shape, bool)
        for part in np.unique(part_B):
            in_part_B = part_B == part
            rows[in_part_B], document_starts[in_part_B] = self.parts[part].read(index_B[in_part_B])
        return rows, document_starts

    def locate(self, indices_B: Array) -> tuple[Array, Array]:
        """(number of the dataset, index of its sample) for each sample; constant time per sample."""
        periods_B, positions_B = np.divmod(indices_B, PERIOD)
        part_B = self._part_P[positions_B].astype(np.int64)
        return part_B, periods_B * self.quotas[part_B] + self._ordinal_P[positions_B]

    def describe(self, samples: int) -> list[str]:
        """A line for each dataset: its requested, rounded and achieved share of the first `samples` samples; its
        epochs, marked REPEATED above 1."""
        periods, rest = divmod(samples, PERIOD)
        counts = periods * self.quotas + np.bincount(self._part_P[:rest], minlength=len(self.parts))
        columns, lines = (self.requested_shares.tolist(), self.quotas.tolist(), counts.tolist()), []
        for part, requested, quota, count in zip(self.parts, *columns, strict=True):
            epochs = count / part.rows_per_epoch
            read = f"REPEATED: {epochs:.2f} epochs" if epochs > 1 else pluralize(epochs, "epoch", ".2g")
            shares = f"requested {requested:.4%}, rounded {quota / PERIOD:.4%}, achieved {count / max(samples, 1):.4%}"
            lines.append(f"{part.dataset.prefix}: {shares}, {read}")
        return lines


def temperature_weights(weights: Sequence[float], temperature: float) -> Array:
    """Weights raised to the power 1 / temperature and normalized to sum 1: unchanged at 1, more equal above."""
    logs = np.log(np.asarray(weights, np.float64)) / temperature
    scaled: Array = np.exp(logs - logs.max())
    shares: Array = scaled / scaled.sum()
    return shares


def round_shares(shares: Array, period: int) -> Array:
    """Whole samples of each dataset in a period, int64: at least 1 each, the largest remainders rounded up."""
    if len(shares) > period:
        raise ConfigError("data.train", f"blend at most {period} datasets", got=len(shares))
    quotas: Array = np.maximum(np.floor(shares * period).astype(np.int64), 1)
    missing = period - int(quotas.sum())
    if missing > 0:
        quotas[np.argsort(quotas - shares * period, kind="stable")[:missing]] += 1
    while missing < 0:  # tiny datasets got more than their share; those that were rounded up most give it
        quotas[np.argmax(np.where(quotas > 1, quotas - shares * period, -np.inf))] -= 1
        missing += 1
    return quotas


def build_schedule(quotas: Array) -> tuple[Array, Array]:
    """(dataset at each position of a period, how many of its samples come before), int32 [P] each."""
    period = int(quotas.sum())
    part_P, ordinal_P = np.empty(period, np.int32), np.empty(period, np.int32)
    upcoming = [(0, part, 0) for part in range(len(quotas))]  # (first position allowed, dataset, ordinal)
    eligible: list[tuple[int, int, int]] = []  # (deadline, dataset, ordinal)
    sizes = quotas.tolist()
    for position in range(period):
        while upcoming and upcoming[0][0] <= position:
            _, part, ordinal = heapq.heappop(upcoming)
            heapq.heappush(eligible, (-(-(ordinal + 1) * period // sizes[part]), part, ordinal))
        _, part, ordinal = heapq.heappop(eligible)
        part_P[position], ordinal_P[position] = part, ordinal
        if ordinal + 1 < sizes[part]:
            heapq.heappush(upcoming, ((ordinal + 1) * period // sizes[part], part, ordinal + 1))
    return part_P, ordinal_P


def training_samples(data: DataConfig, datasets: Sequence[IndexedDataset], seed: int, length: int) -> Samples | Blend:
    """The samples of `data.train`; `datasets`: its datasets, in order. Rows have `length` + 1 tokens; `length` is
    `RunConfig.sample_length`."""
    parts: list[Samples] = []
    for number, dataset in enumerate(datasets):
        part_seed = seed if isinstance(data.train, str) else derive_seed(seed, number, DATASET_SEED)
        if data.read_ahead == "rows" and data.order == "shuffled":
            dataset.expect_random_access()
        if data.order == "stored":
            parts.append(StoredSamples(dataset, length))
        elif data.pack == "best_fit":
            table = pack_table(dataset, length, data.documents_a_row)
            parts.append(PackedSamples(dataset, length, part_seed, table))
        else:
            parts.append(ConcatenatedSamples(dataset, length, part_seed))
    if isinstance(data.train, str):
        return parts[0]
    weights = [part.weight or float(dataset.num_tokens) for part, dataset in zip(data.train, datasets, strict=True)]
    return Blend(parts, temperature_weights(weights, data.blend_temperature).tolist())


def describe_samples(samples: Samples | Blend, count: int) -> list[tuple[str, str]]:
    """(name, value) lines of what a run of `count` samples reads: shares of a blend, epochs, empty parts of rows."""
    if isinstance(samples, Blend):
        parts, lines = samples.parts, [("blend", line) for line in samples.describe(count)]
    else:
        epochs = pluralize(count / samples.rows_per_epoch, "epoch", ".2g")
        parts, lines = [samples], [("data", f"{pluralize(samples.rows_per_epoch, 'row')}, {epochs}")]
    for part in parts:
        if isinstance(part, PackedSamples):
            empty = part.table.empty_share(part.sequence_length + 1)
            lines.append(("packing", f"{part.dataset.prefix}: best fit, {empty:.2%} of the rows empty"))
    return lines


def relative_epochs(samples: Samples | Blend) -> list[float]:
    """Epochs of each dataset per epoch of the dataset that is read most often; [1.0] for a single dataset."""
    if not isinstance(samples, Blend):
        return [1.0]
    epochs = samples.quotas / [part.rows_per_epoch for part in samples.parts]
    return [float(ratio) for ratio in epochs / epochs.max()]


def token_counts(datasets: Sequence[IndexedDataset], samples: Samples | Blend, size: int) -> Tensor:
    """int64 [size]: how often each id occurs in `samples` in one epoch of the dataset that is read most often. Datasets
    without token counts add nothing. `datasets`: those of `samples`, in order."""
    counts_V = torch.zeros(size, dtype=torch.int64)
    for dataset, epochs in zip(datasets, relative_epochs(samples), strict=True):
        if dataset.info is not None:
            dataset_counts_V = torch.tensor(dataset.info.token_counts)
            counts_V[: len(dataset_counts_V)] += (dataset_counts_V.double() * epochs).ceil().long()
    return counts_V


# Batches.


@dataclass(frozen=True)
class BatchReader:
    """Reads batches. A batch depends on the numbers of its samples alone."""

    samples: RowSource
    collator: RowCollator

    def read(self, sample_indices: Sequence[int]) -> Batch:
        """The batch of these samples, in their order."""
        rows, document_starts = self.samples.read(sample_indices)
        return self.collator.batch(rows, sample_indices, document_starts)


def training_collator(
    config: RunConfig,
    datasets: Sequence[IndexedDataset],
    target_error_counts: TargetErrorCounts | None = None,
    steps_before_masking: int = 0,
) -> RowCollator:
    """The collator of the training samples of a run, or of a phase. `steps_before_masking`: steps of the run before the
    first masked one.

    ConfigError if `datasets` lack the token counts that the strategy needs, or have a decoder's mask token in their
    text. Some strategies read the text to count bigrams; `target_error_counts` is for those that adapt.
    """
    if config.masked_inputs is not None:
        mask_token = config.masked_inputs.mask_token
        for dataset in datasets:  # masked inputs would look like text
            counts = () if dataset.info is None else dataset.info.token_counts
            if mask_token < len(counts) and counts[mask_token]:
                rule = f"be an id that {dataset.prefix} does not have"
                hint = "take the tokenizer's mask token, or raise model.vocab_size by one for an id of its own"
                got = f"{mask_token} ({counts[mask_token]:,} times)"
                raise ConfigError("masked_inputs.mask_token", rule, got=got, hint=hint)
        return MaskedInputCollator(config.masked_inputs, config.data, config.seed)
    text = TrainingText(config, datasets, "masking.strategy", target_error_counts)
    return _make_collator(config, text, steps_before_masking)


def held_out_collator(config: RunConfig) -> RowCollator:
    """The collator of held-out rows. Every run masks them alike, except masked diffusion, which masks them as in
    training."""
    return _make_collator(config)


def _make_collator(config: RunConfig, text: TrainingText | None = None, steps_before_masking: int = 0) -> RowCollator:
    """`text`: the run's training text; None: held-out rows, masked by single tokens with seed 0."""
    if config.masking is None:
        return CausalCollator(config.data)
    masking = config.masking.for_evaluation() if text is None else config.masking
    row_builder = EncoderRowBuilder(masking, config.data.end_token, config.data.isolate_documents)
    if config.model.is_causal:
        return CausalEncoderCollator(row_builder, config.data.boundary_targets)
    strategy, seed = (Uniform(), 0) if text is None else (build_strategy(masking, text), config.seed)
    if masking.diffusion:
        return DiffusionCollator(row_builder, seed, strategy)
    importance = None  # held-out rows have no training text to weigh tokens by, and drop none
    if text is not None and masking.dropping is not None:
        importance = STRATEGIES[masking.dropping.by](masking, replace(text, setting="masking.dropping.by"))
    return MaskingCollator(
        row_builder,
        strategy,
        config.model.vocab_size,
        seed,
        samples_per_step=config.batch.global_size,
        steps=config.training.steps,
        steps_before_masking=steps_before_masking,
        subsets=TokenSubsets(row_builder, config.model, importance),
    )


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
