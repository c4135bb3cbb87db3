"""Backbone + objective: from rows of tokens to a loss, and to scores for evaluation."""

from megahead.pretraining.batch import MicroBatch, ScoreRequest, StepBatches
from megahead.pretraining.build import assemble, build, first_weights, weight_shapes
from megahead.pretraining.feed import Feed
from megahead.pretraining.output_layers import MaskHead, OutputEmbedding
from megahead.pretraining.pretraining import Pretraining
from megahead.pretraining.temperature import LearnedTemperature

__all__ = [
    "Feed",
    "LearnedTemperature",
    "MaskHead",
    "MicroBatch",
    "OutputEmbedding",
    "Pretraining",
    "ScoreRequest",
    "StepBatches",
    "assemble",
    "build",
    "first_weights",
    "weight_shapes",
]
