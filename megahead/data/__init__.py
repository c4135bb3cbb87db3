"""Text to tokens to rows: indexed files, tokenizing, sample order, batches."""

from megahead.data.batch import Batch, causal_batch
from megahead.data.feistel import FeistelOrder
from megahead.data.indexed import IndexedDataset, dataset_paths
from megahead.data.info import DatasetInfo
from megahead.data.preprocess import PreprocessReport, preprocess
from megahead.data.progress import Bar, ByteProgress
from megahead.data.samples import Samples, SequentialSamples, StreamSamples
from megahead.data.tokenizer import Tokenizer, load_tokenizer
from megahead.data.vocabulary import save_tokenizer, train_bpe, train_sentencepiece, train_wordpiece
from megahead.data.writer import IndexedDatasetWriter

__all__ = [
    "Bar",
    "Batch",
    "ByteProgress",
    "DatasetInfo",
    "FeistelOrder",
    "IndexedDataset",
    "IndexedDatasetWriter",
    "PreprocessReport",
    "Samples",
    "SequentialSamples",
    "StreamSamples",
    "Tokenizer",
    "causal_batch",
    "dataset_paths",
    "load_tokenizer",
    "preprocess",
    "save_tokenizer",
    "train_bpe",
    "train_sentencepiece",
    "train_wordpiece",
]
