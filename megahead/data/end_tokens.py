"""Checks that the config's end token is the one that closes the documents.

With another id nothing would fail: documents that share a row would just see each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from megahead.corpus.indexed import IndexedDataset
from megahead.errors import ConfigError

if TYPE_CHECKING:
    from megahead.config import DataConfig

LOOKED_AT = 64
"""Number of documents, or rows, that are checked, evenly spread."""


def require_end_tokens(data: DataConfig, dataset: IndexedDataset, *, boundaries_known: bool = False) -> None:
    """ConfigError where `data` needs to know where documents end, and its end token does not show it.

    boundaries_known: rows come with the boundaries of the documents in them (`pack: best_fit`). Cost: the counts beside
    the dataset, and the first and last tokens of a few documents.
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
    """Whether `data` isolates documents, but the dataset shows no boundaries: preshuffled rows, which name none,
    without an end token in any row that was checked."""
    if dataset.num_documents or not data.isolate_documents:
        return False
    return not any((dataset[i] == data.end_token).any() for i in _spread(len(dataset)))


def _flaw(dataset: IndexedDataset, end_token: int) -> str | None:
    """Why `end_token` cannot be right, in words; None if it may be."""
    info = dataset.info
    if info is not None and dataset.num_documents:
        ends = info.token_counts[end_token] if end_token < len(info.token_counts) else 0
        if ends < info.documents:
            documents = int((np.diff(dataset.document_boundaries()) > 0).sum())  # an empty one needs no end
            if ends < documents:
                return f"it occurs {ends:,} times in {documents:,} documents"
    texts = [text for text in map(dataset.document, _spread(dataset.num_documents)) if len(text)]
    open_ = sum(end_token not in (text[0], text[-1]) for text in texts)  # some tools put it before each document
    return f"{open_} of {len(texts)} documents looked at neither end nor begin with it" if open_ else None


def _spread(count: int) -> list[int]:
    """Up to LOOKED_AT numbers below `count`, the first and the last among them."""
    return sorted(set(np.linspace(0, count - 1, min(count, LOOKED_AT)).astype(int).tolist())) if count else []
