"""Text to indexed datasets: sources, tokenizers, writing, merging, inspection. Imports no torch.

*Indexed dataset*: Megatron's `PREFIX.bin` (tokens) and `PREFIX.idx` (where sequences and documents begin), with counts
and checksums in `PREFIX.json`. *Document*: a text as it was read; *sequence*: an entry of the index, a document or a
piece of one. *Preshuffled*: an index that lists rows but no documents, like Pythia's published files. *Engine*: the
library that tokenizes. *Selection*: which records of the input become documents. *Recipe*: all settings of a dataset.

Training of tokenizers (`vocabulary`) and preprocessing in shards (`shards`) are not imported here: few need them.
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
