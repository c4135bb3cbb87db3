"""Held-out perplexity of a checkpoint, with any head it can have."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

import torch

from megahead.config import HeadName
from megahead.convert.export_heads import make_head
from megahead.convert.source import TrainedModel
from megahead.corpus import IndexedDataset
from megahead.data import held_out_masker, held_out_samples
from megahead.data.endings import require_end_tokens
from megahead.distributed import Group
from megahead.errors import FieldError
from megahead.evaluate.perplexity import HeldOut, HeldOutText
from megahead.objectives import Scores
from megahead.pretraining import ScoreRequest


def evaluate_checkpoint(checkpoint: str | PathLike[str], head: HeadName, *, dataset: str | None = None) -> HeldOut:
    """Scores the run's validation text (or `dataset`, a prefix), as many rows as the run's own evaluations read.

    checkpoint: a step folder or a run (its newest). head: `tied` scores by the embedding alone, `pmi` adds log q,
    `trained` uses the head's own matrix. In fp32 on the CPU.
    """
    model = TrainedModel.open(Path(checkpoint))
    make_head(head, model)  # says so when this model cannot have it
    config = model.config
    prefix = dataset or config.data.validation
    if prefix is None:
        raise FieldError("data.validation", "name a held-out dataset", got="missing", hint="or give one to evaluate on")
    text = IndexedDataset(prefix)
    require_end_tokens(config.data, text)
    samples = held_out_samples(text, config.sample_length())
    rows, masker = config.training.evaluate_samples, held_out_masker(config)
    held_out = HeldOutText(samples, config.data, rows, config.batch.micro_size, Group(), masker)
    pretraining = model.load()

    @torch.no_grad()
    def score(scoring: ScoreRequest) -> Scores:
        return pretraining(scoring)

    return held_out.evaluate(score, model.training_free_bias() if head == "pmi" else None, torch.device("cpu"))
