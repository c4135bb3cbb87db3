"""Which span of a dataset's tokens sample k is: a pure function of (dataset, row length, seed, k).

It does not depend on ranks, batches or progress, so a run resumes at any sample and on any mesh with the same order.
Sample k has place k % `per_epoch` in epoch k // `per_epoch`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from megahead.corpus.indexed import IndexedDataset
from megahead.data.shuffle import FOR_OFFSET, FOR_ORDER, FeistelOrder, derive_seed
from megahead.errors import DataError
from megahead.wording import counted

Array = np.ndarray[Any, Any]


class Samples(ABC):
    """Rows of `sequence_length` + 1 tokens (T inputs and their T targets), numbered from 0 without end."""

    def __init__(self, dataset: IndexedDataset, sequence_length: int, per_epoch: int, min_tokens: int) -> None:
        if per_epoch < 1:
            raise DataError(
                f"`{dataset.prefix}` must hold at least {min_tokens:,} tokens for rows of "
                f"{counted(sequence_length, 'target')}, but holds {dataset.num_tokens:,} instead; add text or shorten "
                "data.sequence_length."
            )
        self.dataset, self.sequence_length, self.per_epoch = dataset, sequence_length, per_epoch

    def __len__(self) -> int:
        return self.per_epoch

    def rows(self, sample_indices: Sequence[int] | Array) -> Array:
        """The samples' tokens, int64 [B, T+1]; index // `per_epoch` is the epoch. O(B T), whatever the dataset."""
        indices_B = np.asarray(sample_indices, np.int64)
        if indices_B.size and indices_B.min() < 0:
            raise IndexError(f"sample indices must not be negative, but one is {indices_B.min()}")
        rows = np.empty((len(indices_B), self.sequence_length + 1), np.int64)
        epochs_B, places_B = np.divmod(indices_B, self.per_epoch)
        for epoch in set(epochs_B.tolist()):
            (slots,) = np.nonzero(epochs_B == epoch)
            self._fill(rows, slots, epoch, places_B[slots])
        return rows

    def document_starts(self, sample_indices: Sequence[int] | Array) -> Array | None:
        """bool [B, T+1]: where a document is known to begin; None if the only sign is the end token before it."""
        return None

    def _fill(self, rows: Array, slots: Array, epoch: int, places: Array) -> None:
        """Writes the samples at `places` of this epoch into `rows[slots]`; a slot is a row of the batch."""
        length = self.sequence_length + 1
        firsts = self._first_tokens(epoch, places).tolist()
        if self.dataset.random_access:
            for first in firsts:  # all at once, so that the disk reads them in parallel
                self.dataset.will_read(first, length)
        for row, first in zip(slots.tolist(), firsts, strict=True):
            rows[row] = self.dataset.read(first, length)

    @abstractmethod
    def _first_tokens(self, epoch: int, places: Array) -> Array:
        """For the samples at `places` of this epoch: the index of their first token in the dataset."""


class StreamSamples(Samples):
    """The whole text cut into rows, for training; each epoch is cut at another offset and shuffled anew.

    An epoch has (tokens - T) // T rows: that many fit at any offset in [0, T), and at most 2 T tokens are left out.
    """

    def __init__(self, dataset: IndexedDataset, sequence_length: int, seed: int) -> None:
        per_epoch = (dataset.num_tokens - sequence_length) // sequence_length
        super().__init__(dataset, sequence_length, per_epoch, min_tokens=2 * sequence_length)
        self.seed = seed
        self._order = lru_cache(maxsize=4)(self._epoch_order)

    def offset(self, epoch: int) -> int:
        """Tokens skipped at the start of the text in this epoch, in [0, T)."""
        return derive_seed(self.seed, epoch, FOR_OFFSET) % self.sequence_length

    def _epoch_order(self, epoch: int) -> FeistelOrder:
        return FeistelOrder(self.per_epoch, derive_seed(self.seed, epoch, FOR_ORDER))

    def _first_tokens(self, epoch: int, places: Array) -> Array:
        return self.offset(epoch) + self._order(epoch).take(places) * self.sequence_length


class SequentialSamples(Samples):
    """The whole text cut into rows in file order, for validation: every target at most once an epoch."""

    def __init__(self, dataset: IndexedDataset, sequence_length: int) -> None:
        per_epoch = (dataset.num_tokens - 1) // sequence_length
        super().__init__(dataset, sequence_length, per_epoch, min_tokens=sequence_length + 1)

    def _first_tokens(self, epoch: int, places: Array) -> Array:
        return places * self.sequence_length


class StoredSamples(Samples):
    """The dataset's own sequences as rows, as they are and in their own order: Pythia's preshuffled files.

    Every sequence must have T + 1 tokens: rows are never joined, cut or shuffled.
    """

    def __init__(self, dataset: IndexedDataset, sequence_length: int) -> None:
        for i in (0, -1)[: len(dataset)]:
            self._check(dataset, i, sequence_length)
        super().__init__(dataset, sequence_length, len(dataset), min_tokens=sequence_length + 1)

    def _fill(self, rows: Array, slots: Array, epoch: int, places: Array) -> None:
        for slot, place in zip(slots.tolist(), places.tolist(), strict=True):
            rows[slot] = self._check(self.dataset, place, self.sequence_length)

    def _first_tokens(self, epoch: int, places: Array) -> Array:
        return places * (self.sequence_length + 1)

    @staticmethod
    def _check(dataset: IndexedDataset, i: int, sequence_length: int) -> Array:
        row = dataset[i]
        if len(row) != sequence_length + 1:
            raise DataError(
                f"`{dataset.prefix}` must have sequences of {sequence_length + 1:,} tokens to be read as stored with "
                f"data.sequence_length {sequence_length:,}, but sequence {i} has {len(row):,}."
            )
        return row


def held_out_samples(dataset: IndexedDataset, sequence_length: int) -> Samples:
    """Rows for evaluation: in file order, and never across the rows of a preshuffled file."""
    kind = SequentialSamples if dataset.num_documents else StoredSamples  # preshuffled files name no documents
    return kind(dataset, sequence_length)


class EvenlySpread:
    """`count` of the rows of `samples` (or all, if there are fewer), evenly spread over the text, by numbers of their
    own from 0: by these they are masked, so that what is even over consecutive numbers stays so."""

    def __init__(self, samples: Samples, count: int) -> None:
        self._samples, self.count = samples, min(count, samples.per_epoch)

    def rows(self, sample_indices: Sequence[int] | Array) -> Array:
        """int64 [B, T+1]."""
        return self._samples.rows(self._places(sample_indices))

    def document_starts(self, sample_indices: Sequence[int] | Array) -> Array | None:
        """As of `Samples`."""
        return self._samples.document_starts(self._places(sample_indices))

    def _places(self, sample_indices: Sequence[int] | Array) -> Array:
        places: Array = np.asarray(sample_indices, np.int64) * self._samples.per_epoch // self.count
        return places
