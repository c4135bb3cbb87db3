"""The samples that a run trains on, as its config asks: of one dataset or a blend, cut into rows and ordered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from megahead.corpus.indexed import IndexedDataset
from megahead.data.blending import Blend, temperature_weights
from megahead.data.packing import PackedSamples, pack_table
from megahead.data.samples import Samples, StoredSamples, StreamSamples
from megahead.data.shuffle import FOR_DATASET, derive_seed
from megahead.wording import counted

if TYPE_CHECKING:
    from megahead.config import DataConfig


class RowSource(Protocol):
    """Rows of tokens by number, from 0 without end: a pure function of the number."""

    def rows(self, sample_indices: Sequence[int] | np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """int64 [B, T+1]; `packing.PADDING` where a row is empty."""
        ...

    def document_starts(self, sample_indices: Sequence[int] | np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
        """bool [B, T+1]: where a document is known to begin; None if the only sign is the end token before it."""
        return None


def training_samples(
    data: DataConfig, datasets: Sequence[IndexedDataset], seed: int, length: int | None = None
) -> Samples | Blend:
    """The samples of `data.train`, whose datasets were opened in its order; rows have `length` + 1 tokens.

    length: data.sequence_length when left out; masked rows have less (`RunConfig.sample_length`).
    """
    length = length or data.sequence_length
    if data.read_ahead == "rows" and data.order == "shuffled":
        for dataset in datasets:
            dataset.expect_random_access()
    if isinstance(data.train, str):
        return _rows_of(data, datasets[0], seed, length)
    parts = [
        _rows_of(data, dataset, derive_seed(seed, number, FOR_DATASET), length)
        for number, dataset in enumerate(datasets)
    ]
    weights = [part.weight or float(set_.num_tokens) for part, set_ in zip(data.train, datasets, strict=True)]
    return Blend(parts, temperature_weights(weights, data.blend_temperature).tolist())


def describe_samples(samples: Samples | Blend, count: int) -> list[tuple[str, str]]:
    """(name, value) lines of what a run of `count` samples reads: shares of a blend, epochs, empty parts of rows."""
    lines = []
    if isinstance(samples, Blend):
        lines += [("blend", share.describe()) for share in samples.shares(count)]
    else:
        lines.append(
            ("data", f"{counted(samples.per_epoch, 'row')}, {counted(count / samples.per_epoch, 'epoch', '.2g')}")
        )
    for part in samples.parts if isinstance(samples, Blend) else [samples]:
        if isinstance(part, PackedSamples):
            empty = part.table.empty_share(part.sequence_length + 1)
            lines.append(("packing", f"{part.dataset.prefix}: best fit, {empty:.2%} of the rows empty"))
    return lines


def relative_epochs(samples: Samples | Blend) -> list[float]:
    """How often each dataset is read in the time in which the most read one is read once; [1] for a single dataset."""
    if not isinstance(samples, Blend):
        return [1.0]
    epochs = samples.quotas / [part.per_epoch for part in samples.parts]
    return [float(each) for each in epochs / epochs.max()]


def token_counts(datasets: Sequence[IndexedDataset], samples: Samples | Blend, size: int) -> Tensor:
    """int64 [size]: how often each id occurs in `samples` until the most read dataset is read once; datasets without
    token counts add nothing. `datasets`: those of `samples`, in its order."""
    counts_V = torch.zeros(size, dtype=torch.int64)
    for dataset, epochs in zip(datasets, relative_epochs(samples), strict=True):
        if dataset.info is not None:
            counted_V = torch.tensor(dataset.info.token_counts)
            counts_V[: len(counted_V)] += (counted_V.double() * epochs).ceil().long()
    return counts_V


def _rows_of(data: DataConfig, dataset: IndexedDataset, seed: int, length: int) -> Samples:
    if data.order == "stored":
        return StoredSamples(dataset, length)
    if data.pack == "best_fit":
        return PackedSamples(dataset, length, seed, pack_table(dataset, length, data.documents_a_row))
    return StreamSamples(dataset, length, seed)
