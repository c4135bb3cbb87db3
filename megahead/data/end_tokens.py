"""Checks that the config's end token is the one that closes the documents.

With a wrong id nothing would fail, but documents in one row would attend to each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from megahead.corpus.indexed import IndexedDataset
from megahead.errors import ConfigError

if TYPE_CHECKING:
    from megahead.config import DataConfig

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


def without_boundaries(data: DataConfig, dataset: IndexedDataset) -> bool:
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
