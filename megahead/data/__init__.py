"""Text to tokens to rows: indexed files, tokenizing, sample order, batches.

Only batches need torch, whose import costs a second: they are imported on first use, so that the worker processes and
commands that turn text into tokens never pay for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megahead.data.blending import Blend
from megahead.data.feistel import FeistelOrder
from megahead.data.indexed import IndexedDataset, dataset_paths
from megahead.data.info import DatasetInfo
from megahead.data.packing import PackedSamples
from megahead.data.preprocess import PreprocessReport, preprocess
from megahead.data.progress import Bar, ByteProgress
from megahead.data.samples import Samples, SequentialSamples, StoredSamples, StreamSamples, held_out_samples
from megahead.data.tokenizer import Tokenizer, load_tokenizer
from megahead.data.training import SampleRows, training_samples
from megahead.data.vocabulary import save_tokenizer, train_bpe, train_sentencepiece, train_wordpiece
from megahead.data.writer import IndexedDatasetWriter

if TYPE_CHECKING:
    from megahead.data.batch import Batch, causal_batch

__all__ = [
    "Bar",
    "Batch",
    "Blend",
    "ByteProgress",
    "DatasetInfo",
    "FeistelOrder",
    "IndexedDataset",
    "IndexedDatasetWriter",
    "PackedSamples",
    "PreprocessReport",
    "SampleRows",
    "Samples",
    "SequentialSamples",
    "StoredSamples",
    "StreamSamples",
    "Tokenizer",
    "causal_batch",
    "dataset_paths",
    "held_out_samples",
    "load_tokenizer",
    "preprocess",
    "save_tokenizer",
    "train_bpe",
    "train_sentencepiece",
    "train_wordpiece",
    "training_samples",
]


def __getattr__(name: str) -> Any:
    if name in ("Batch", "causal_batch"):
        from megahead.data import batch

        return getattr(batch, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
