"""Held-out perplexity of a checkpoint, with any head that it can have."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path

import torch

from megahead.config import HeadName, RunConfig
from megahead.convert.export_heads import require_head
from megahead.convert.source import TrainedModel
from megahead.data import Samples, held_out_masker
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
    return evaluate_on_each(checkpoint, head, [dataset])[0]


def evaluate_on_each(
    checkpoint: str | PathLike[str], head: HeadName, datasets: Sequence[str | PathLike[str] | None]
) -> list[ValidationResult]:
    """The same for several datasets, one language each for example, with the weights read once."""
    model = TrainedModel.open(Path(checkpoint))
    require_head(head, model)
    mark = model.tokenizer_mark()
    opened = [open_held_out(model.config, None if prefix is None else str(prefix), mark) for prefix in datasets]
    pretraining = model.load()
    bias_V = model.training_free_bias() if head == "pmi" else None

    @torch.no_grad()
    def score(request: EvaluationRequest) -> EvaluationSums:
        return pretraining(request)

    return [_validation_set(model.config, samples).evaluate(score, bias_V, torch.device("cpu")) for samples in opened]


def _validation_set(config: RunConfig, samples: Samples) -> ValidationSet:
    rows, masker = config.training.evaluate_samples, held_out_masker(config)
    return ValidationSet(samples, config.data, rows, config.batch.micro_size, Group(), masker)
