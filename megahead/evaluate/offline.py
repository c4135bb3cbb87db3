"""Held-out perplexity of a checkpoint, with any head that it can have."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

import torch

from megahead.config import HeadName
from megahead.convert.export_heads import make_head
from megahead.convert.source import TrainedModel
from megahead.data import held_out_masker
from megahead.distributed import Group
from megahead.evaluate.held_out import open_held_out
from megahead.evaluate.perplexity import ValidationResult, ValidationSet
from megahead.objectives import EvaluationSums
from megahead.pretraining import EvaluationRequest


def evaluate_checkpoint(
    checkpoint: str | PathLike[str], head: HeadName, *, dataset: str | None = None
) -> ValidationResult:
    """Scores the run's validation dataset (or `dataset`, a prefix), as many rows as in the run's own evaluations.

    checkpoint: a step folder, or a run folder for its newest. head: `tied` scores with the embedding alone, `pmi` adds
    log q (the training-free head), `trained` uses the head's own matrix. In fp32 on the CPU.
    """
    model = TrainedModel.open(Path(checkpoint))
    make_head(head, model)  # UserError if this model cannot have it
    config = model.config
    samples = open_held_out(config, dataset)
    rows, masker = config.training.evaluate_samples, held_out_masker(config)
    validation_set = ValidationSet(samples, config.data, rows, config.batch.micro_size, Group(), masker)
    pretraining = model.load()

    @torch.no_grad()
    def score(request: EvaluationRequest) -> EvaluationSums:
        return pretraining(request)

    return validation_set.evaluate(score, model.training_free_bias() if head == "pmi" else None, torch.device("cpu"))
