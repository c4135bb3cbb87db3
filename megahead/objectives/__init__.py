"""Objectives: one softmax over candidate rows of the embedding table (headless) or over all of it (vanilla)."""

from megahead.objectives.candidate_shard import CandidateShard
from megahead.objectives.candidate_softmax import (
    EvaluationSums,
    candidate_loss,
    candidate_loss_reference,
    evaluation_sums,
)
from megahead.objectives.candidates import Candidates, unique_candidates, vocabulary_candidates
from megahead.objectives.contrastive import Headless, Objective, Pool, Vanilla, build_objective, cwt_loss
from megahead.objectives.streamed import streamed_sums
from megahead.objectives.training_free_head import log_unigram, training_free_bias

__all__ = [
    "CandidateShard",
    "Candidates",
    "EvaluationSums",
    "Headless",
    "Objective",
    "Pool",
    "Vanilla",
    "build_objective",
    "candidate_loss",
    "candidate_loss_reference",
    "cwt_loss",
    "evaluation_sums",
    "log_unigram",
    "streamed_sums",
    "training_free_bias",
    "unique_candidates",
    "vocabulary_candidates",
]
