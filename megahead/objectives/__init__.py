"""Objectives: a softmax over candidates, which are some rows of the embedding (headless) or all of them (vanilla).

*Headless*: contrastive weight tying. The candidates are the targets of a *candidate group* (consecutive samples). Each
has a row (its input embedding) and a bias (log of how often it counts). *Positive*: the candidate that is an output's
target. *Pool*: all candidates of one group. *Training-free head*: the input embeddings and a bias from counted
frequencies, with which a headless model predicts tokens. *Row step*: what is done to each output's row of scores.
"""

from megahead.objectives.candidate_shard import CandidateShard
from megahead.objectives.candidate_softmax import (
    EvaluationSums,
    candidate_loss,
    candidate_loss_reference,
    evaluation_sums,
)
from megahead.objectives.candidates import Candidates, unique_candidates, vocabulary_candidates
from megahead.objectives.contrastive import Headless, Objective, Pool, Vanilla, build_objective, cwt_loss
from megahead.objectives.detection import DetectionResult, DetectionSums, detection_sums
from megahead.objectives.phrases import PhraseResult, PhraseSums, phrase_sums
from megahead.objectives.scores import SCORES, Cosine, Dot, Harmonic, Score
from megahead.objectives.streamed import streamed_sums
from megahead.objectives.training_free_head import log_unigram, training_free_bias

__all__ = [
    "SCORES",
    "CandidateShard",
    "Candidates",
    "Cosine",
    "DetectionResult",
    "DetectionSums",
    "Dot",
    "EvaluationSums",
    "Harmonic",
    "Headless",
    "Objective",
    "PhraseResult",
    "PhraseSums",
    "Pool",
    "Score",
    "Vanilla",
    "build_objective",
    "candidate_loss",
    "candidate_loss_reference",
    "cwt_loss",
    "detection_sums",
    "evaluation_sums",
    "log_unigram",
    "phrase_sums",
    "streamed_sums",
    "training_free_bias",
    "unique_candidates",
    "vocabulary_candidates",
]
