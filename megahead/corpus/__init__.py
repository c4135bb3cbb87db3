"""Text to indexed files: sources, tokenizers, writing, merging, inspection. Imports no torch.

The trainers of tokenizers (`vocabulary`) and preprocessing in shards (`shards`) are imported by name: few need them.
"""

from megahead.corpus.dataset_info import DatasetInfo
from megahead.corpus.indexed import IndexedDataset, dataset_paths
from megahead.corpus.preprocess import PreprocessReport, preprocess
from megahead.corpus.progress import Bar, ByteProgress
from megahead.corpus.tokenizer import Tokenizer, load_tokenizer
from megahead.corpus.writer import IndexedDatasetWriter

__all__ = [
    "Bar",
    "ByteProgress",
    "DatasetInfo",
    "IndexedDataset",
    "IndexedDatasetWriter",
    "PreprocessReport",
    "Tokenizer",
    "dataset_paths",
    "load_tokenizer",
    "preprocess",
]
