"""Backbone + objective: from rows of tokens to a loss, and to scores for evaluation."""

from megahead.pretraining.batch import MicroBatch, Scoring, StepBatches
from megahead.pretraining.build import assemble, build, first_weights, weight_shapes
from megahead.pretraining.feed import Feed
from megahead.pretraining.heads import MaskHead, OutputEmbedding
from megahead.pretraining.pretraining import Pretraining
from megahead.pretraining.temperature import LearnedTemperature

__all__ = [
    "Feed",
    "LearnedTemperature",
    "MaskHead",
    "MicroBatch",
    "OutputEmbedding",
    "Pretraining",
    "Scoring",
    "StepBatches",
    "assemble",
    "build",
    "first_weights",
    "weight_shapes",
]
