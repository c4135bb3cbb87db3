"""Indexed text to batches: the order of samples, packing, blending, masking.

*Sample*: one numbered training example; *row*: its line in a batch, T inputs and their T targets (T + 1 tokens). A
sample's number alone decides which tokens it has and how they are masked, on any number of ranks. *Place*: an index
within an epoch, a row or an order. *Blend*: several datasets in fixed proportions. *Unit*: tokens masked together.
"""

from megahead.corpus import IndexedDataset, IndexedDatasetWriter
from megahead.data.batch import Batch, MaskedPhrases, ReplacedTokens, causal_batch
from megahead.data.batch_reader import (
    BatchReader,
    RowMasker,
    evaluation_target_counts,
    held_out_masker,
    training_masker,
)
from megahead.data.blending import Blend
from megahead.data.difficulty import Difficulty
from megahead.data.diffusion import Diffusion
from megahead.data.dropping import TokenDropping
from megahead.data.framing import Framing
from megahead.data.masked_inputs import MaskedInputs
from megahead.data.masking import Masker
from megahead.data.next_tokens import NextTokens
from megahead.data.packing import PackedSamples
from megahead.data.replacing import Replacing
from megahead.data.samples import (
    EvenlySpread,
    Samples,
    SequentialSamples,
    StoredSamples,
    StreamSamples,
    held_out_samples,
)
from megahead.data.sampling import RowSource, training_samples
from megahead.data.shuffle import FeistelOrder

__all__ = [
    "Batch",
    "BatchReader",
    "Blend",
    "Difficulty",
    "Diffusion",
    "EvenlySpread",
    "FeistelOrder",
    "Framing",
    "IndexedDataset",
    "IndexedDatasetWriter",
    "MaskedInputs",
    "MaskedPhrases",
    "Masker",
    "NextTokens",
    "PackedSamples",
    "ReplacedTokens",
    "Replacing",
    "RowMasker",
    "RowSource",
    "Samples",
    "SequentialSamples",
    "StoredSamples",
    "StreamSamples",
    "TokenDropping",
    "causal_batch",
    "evaluation_target_counts",
    "held_out_masker",
    "held_out_samples",
    "training_masker",
    "training_samples",
]
