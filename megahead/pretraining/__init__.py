"""Backbone + objective: from rows of tokens to a loss, and to scores for evaluation.

*Headless* (contrastive weight tying): the softmax runs over the input embeddings of a candidate group's targets.
*Candidate group*: consecutive samples whose targets are candidates for each other. *Feed*: prepares batches and their
candidates ahead, in a background thread. *Output*: a hidden state that has a target.
"""

from megahead.pretraining.batch import (
    EvaluationRequest,
    MicroBatch,
    StepBatches,
    documents_of,
    shorter_rows_of,
    target_positions_of,
)
from megahead.pretraining.build import (
    GENERATOR,
    TEMPERATURE,
    FirstWeights,
    build_pretraining,
    first_weights,
    weight_shapes,
)
from megahead.pretraining.candidate_groups import gather_targets
from megahead.pretraining.detection import Detection
from megahead.pretraining.feed import Feed
from megahead.pretraining.output_layers import MaskHead, OutputBias, OutputEmbedding
from megahead.pretraining.pretraining import Pretraining
from megahead.pretraining.softmax import Softmax
from megahead.pretraining.temperature import LearnedTemperature

__all__ = [
    "GENERATOR",
    "TEMPERATURE",
    "Detection",
    "EvaluationRequest",
    "Feed",
    "FirstWeights",
    "LearnedTemperature",
    "MaskHead",
    "MicroBatch",
    "OutputBias",
    "OutputEmbedding",
    "Pretraining",
    "Softmax",
    "StepBatches",
    "build_pretraining",
    "documents_of",
    "first_weights",
    "gather_targets",
    "shorter_rows_of",
    "target_positions_of",
    "weight_shapes",
]
