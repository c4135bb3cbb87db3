"""Text to tokens to rows: indexed files, tokenizing, sample order, batches.

Only batches need torch, whose import costs a second, and few need the trainers of vocabularies: both are imported on
first use, so that the worker processes and commands that turn text into tokens never pay for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megahead import on_first_use
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
from megahead.data.writer import IndexedDatasetWriter

if TYPE_CHECKING:
    from megahead.data.batch import Batch, causal_batch
    from megahead.data.masking import Masker
    from megahead.data.reading import BatchReader, asked_counts, held_out_masker, training_masker
    from megahead.data.vocabulary import save_tokenizer, train_bpe, train_sentencepiece, train_wordpiece

__all__ = [
    "Bar",
    "Batch",
    "BatchReader",
    "Blend",
    "ByteProgress",
    "DatasetInfo",
    "FeistelOrder",
    "IndexedDataset",
    "IndexedDatasetWriter",
    "Masker",
    "PackedSamples",
    "PreprocessReport",
    "SampleRows",
    "Samples",
    "SequentialSamples",
    "StoredSamples",
    "StreamSamples",
    "Tokenizer",
    "asked_counts",
    "causal_batch",
    "dataset_paths",
    "held_out_masker",
    "held_out_samples",
    "load_tokenizer",
    "preprocess",
    "save_tokenizer",
    "train_bpe",
    "train_sentencepiece",
    "train_wordpiece",
    "training_masker",
    "training_samples",
]


__getattr__ = on_first_use(
    __name__,
    batch=("Batch", "causal_batch"),
    masking=("Masker",),
    reading=("BatchReader", "asked_counts", "held_out_masker", "training_masker"),
    vocabulary=("save_tokenizer", "train_bpe", "train_sentencepiece", "train_wordpiece"),
)
