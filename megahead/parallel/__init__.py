"""Tensor and sequence parallelism: sharded twins of plain layers, the plan that applies them, and the parallel loss.

*Twin* of a layer: the same function with its weights split over a tensor group. *Sharding table*: names the layers of a
model that are replaced by twins. *Hollow* parameter: it has a shape, but no memory yet.
"""

from megahead.parallel.build import assemble, fill_
from megahead.parallel.candidate_softmax import parallel_candidate_loss, parallel_evaluation_sums
from megahead.parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    SharedHeadsLinear,
    SharedRMSNorm,
    VocabularyParallelEmbedding,
)
from megahead.parallel.plan import parallelize_, shard_dims
from megahead.parallel.pretraining import TensorParallelPretraining
from megahead.parallel.rows import place_table_
from megahead.parallel.sequence import SequenceColumnLinear, SequenceLayerNorm, SequenceRowLinear

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "SequenceColumnLinear",
    "SequenceLayerNorm",
    "SequenceRowLinear",
    "SharedHeadsLinear",
    "SharedRMSNorm",
    "TensorParallelPretraining",
    "VocabularyParallelEmbedding",
    "assemble",
    "fill_",
    "parallel_candidate_loss",
    "parallel_evaluation_sums",
    "parallelize_",
    "place_table_",
    "shard_dims",
]
