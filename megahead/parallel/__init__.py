"""Models split over a tensor group: sharded twins of plain layers, the plan that applies them, the shared-out loss."""

from megahead.parallel.build import assemble, build, fill_
from megahead.parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabularyParallelEmbedding
from megahead.parallel.plan import parallelize_, shard_dims
from megahead.parallel.pretraining import TensorParallelPretraining
from megahead.parallel.sequence import SequenceColumnLinear, SequenceLayerNorm, SequenceRowLinear
from megahead.parallel.candidate_softmax import CandidateShard, parallel_candidate_loss, parallel_candidate_scores

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "SequenceColumnLinear",
    "SequenceLayerNorm",
    "SequenceRowLinear",
    "CandidateShard",
    "TensorParallelPretraining",
    "VocabularyParallelEmbedding",
    "assemble",
    "build",
    "fill_",
    "parallelize_",
    "shard_dims",
    "parallel_candidate_loss",
    "parallel_candidate_scores",
]
