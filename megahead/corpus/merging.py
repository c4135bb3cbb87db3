"""Concatenates several indexed datasets into one, with their document boundaries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megahead.corpus.dataset_info import require_one_tokenizer
from megahead.corpus.index_layout import LARGEST_UINT16_VOCABULARY
from megahead.corpus.indexed import IndexedDataset, dataset_paths
from megahead.corpus.inspection import check_back_to_back, count_tokens
from megahead.corpus.progress import ByteProgress, Silent
from megahead.corpus.writer import IndexedDatasetWriter
from megahead.errors import DataError

BLOCK_TOKENS = 1 << 22
Array = np.ndarray[Any, Any]


def merge_datasets(
    prefixes: Sequence[str | Path],
    output: str | Path,
    *,
    overwrite: bool = False,
    progress: ByteProgress | None = None,
) -> IndexedDataset:
    """Writes the sequences and documents of all `prefixes`, in order, to `output`; whole, or not at all.

    Document boundaries are kept as they are, also if a document has several sequences, or if the index lists none at
    all (preshuffled rows). Memory: some 100 MB, and the index arrays. DataError if token types or vocabularies differ,
    if only some of them list documents, if none has a token, if `output` is one of `prefixes`, or (unless `overwrite`)
    if it exists.
    """
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    _check_alike(datasets, output)
    _check_new(output, overwrite)
    progress = progress or Silent()
    progress.begin(sum(dataset.num_tokens * dataset.dtype.itemsize for dataset in datasets))
    tokenizers = [each.cut_by() or (None if each.info is None else each.info.tokenizer) for each in datasets]
    vocab_size = max(map(_vocabulary, datasets))
    tokenizer = tokenizers[0] if len(set(map(str, tokenizers))) == 1 else None
    with IndexedDatasetWriter(output, vocab_size=vocab_size, tokenizer=tokenizer) as writer:
        for dataset in datasets:
            check_back_to_back(dataset)
            for tokens, lengths, documents in _blocks(dataset):
                writer.add_documents(tokens, lengths, sequences=documents)
                progress.advance(tokens.nbytes, tokens.nbytes)
        writer.text_bytes = _text_bytes(datasets)
    return IndexedDataset(output)


def _check_alike(datasets: Sequence[IndexedDataset], output: str | Path) -> None:
    if not datasets:
        raise DataError("there must be at least one dataset to merge, but none was given.")
    if dataset_paths(output)[0].resolve() in {dataset.bin_path.resolve() for dataset in datasets}:
        raise DataError(f"the output must be a new dataset, but `{output}` is one of those to merge.")
    require_one_tokenizer({f"`{each.prefix}`": each.cut_by() for each in datasets if len(each)})
    kinds: dict[str, list[object]] = {
        "token types": [dataset.dtype.name for dataset in datasets],
        "vocabulary sizes": [dataset.info and dataset.info.vocab_size for dataset in datasets],
        "kinds of rows": ["of documents" if dataset.num_documents else "preshuffled" for dataset in datasets],
    }
    for what, values in kinds.items():
        pairs = zip(values, datasets, strict=True)
        known = [(value, dataset) for value, dataset in pairs if value is not None and len(dataset)]
        for value, dataset in known[1:]:
            if value != known[0][0]:
                raise DataError(
                    f"datasets to merge must have equal {what}, but `{known[0][1].prefix}` has {known[0][0]} and "
                    f"`{dataset.prefix}` {value}; make them the same way."
                )


def _check_new(output: str | Path, overwrite: bool) -> None:
    there = next((path for path in dataset_paths(output) if path.exists()), None)
    if there is not None and not overwrite:
        raise DataError(f"`{there}` must not exist yet, but does; name another --output, or add --overwrite.")


def _vocabulary(dataset: IndexedDataset) -> int:
    """The vocabulary size in `PREFIX.json`, or else the least that covers the ids and gives the same token type."""
    if dataset.info is not None:
        return dataset.info.vocab_size
    min_size = 1 if dataset.dtype == np.uint16 else LARGEST_UINT16_VOCABULARY
    return max(min_size, len(count_tokens(dataset)))


def _text_bytes(datasets: Sequence[IndexedDataset]) -> int:
    """The text bytes of all datasets; 0 (unknown) if they are unknown for one of them."""
    sizes = [0 if dataset.info is None else dataset.info.text_bytes for dataset in datasets if dataset.num_tokens]
    return sum(sizes) if all(sizes) else 0


def _blocks(dataset: IndexedDataset) -> Iterator[tuple[Array, Array, Array]]:
    """(tokens, length of each sequence, sequences of each document) of about four million tokens each, whole documents.

    Preshuffled rows belong to no document: their third array is empty.
    """
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(dataset.sizes, dtype=np.int64)])
    boundaries = dataset.document_index if dataset.num_documents else np.arange(len(dataset) + 1)
    first, starts = 0, ends[boundaries]
    while first < len(boundaries) - 1:
        last = int(np.searchsorted(starts, starts[first] + BLOCK_TOKENS, side="right")) - 1
        last = max(last, first + 1)
        low, high = int(boundaries[first]), int(boundaries[last])
        tokens = dataset.read(int(ends[low]), int(ends[high] - ends[low]))
        documents = np.diff(boundaries[first : last + 1]) if dataset.num_documents else np.empty(0, np.int64)
        yield tokens, dataset.sizes[low:high], documents
        first = last
