"""Backbone + objective: from rows of tokens to a loss, and to scores for evaluation."""

from megahead.pretraining.batch import MicroBatch, Scoring, StepBatches
from megahead.pretraining.build import assemble, build, first_weights, weight_shapes
from megahead.pretraining.feed import Feed
from megahead.pretraining.pretraining import OutputEmbedding, Pretraining
from megahead.pretraining.temperature import LearnedTemperature

__all__ = [
    "Feed",
    "LearnedTemperature",
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
