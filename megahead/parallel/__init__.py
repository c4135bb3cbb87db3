"""Models split over a tensor group: sharded twins of plain layers, the plan that applies them, the shared-out loss."""

from megahead.parallel.build import assemble, build, fill_
from megahead.parallel.candidate_softmax import CandidateShard, parallel_candidate_loss, parallel_candidate_scores
from megahead.parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabularyParallelEmbedding
from megahead.parallel.plan import parallelize_, shard_dims
from megahead.parallel.pretraining import TensorParallelPretraining
from megahead.parallel.sequence import SequenceColumnLinear, SequenceLayerNorm, SequenceRowLinear

__all__ = [
    "CandidateShard",
    "ColumnParallelLinear",
    "RowParallelLinear",
    "SequenceColumnLinear",
    "SequenceLayerNorm",
    "SequenceRowLinear",
    "TensorParallelPretraining",
    "VocabularyParallelEmbedding",
    "assemble",
    "build",
    "fill_",
    "parallel_candidate_loss",
    "parallel_candidate_scores",
    "parallelize_",
    "shard_dims",
]
