"""Evaluation in the middle of training: held-out text, scored with the head the objective has."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megahead.config import RunConfig
from megahead.corpus import IndexedDataset
from megahead.data import asked_counts, held_out_masker, held_out_samples
from megahead.distributed import Group
from megahead.engine import Engine
from megahead.evaluate import HeldOut, HeldOutText
from megahead.objectives import Scores, training_free_bias
from megahead.pretraining import ScoreRequest
from megahead.train.state import TrainingState


class Evaluation:
    """Scores the validation dataset; a headless run uses the bias that needs no training: for the paper's objective
    log q, q counted so far, smoothed by the dataset's (or the dataset's alone, where rare tokens are masked more
    often than held-out rows have them)."""

    def __init__(self, config: RunConfig, held_out: IndexedDataset, data: Group, device: torch.device) -> None:
        self.head = config.objective.head()
        self._config = config
        samples = held_out_samples(held_out, config.sample_length())
        rows, masker = config.training.evaluate_samples, held_out_masker(config)
        self._text = HeldOutText(samples, config.data, rows, config.batch.micro_size, data, masker)
        self._data = data
        self._device = device

    def run(self, engine: Engine, state: TrainingState, interrupted: Callable[[], bool]) -> HeldOut | None:
        """None when `interrupted` says so, which is asked before each batch, alike on all ranks. Collective."""
        bias_V = None
        if self.head == "pmi":
            counts_V, asked_V = state.target_counts(self._data), asked_counts(self._config, state.dataset_counts)
            bias_V = training_free_bias(
                self._config.objective,
                self._config.model.vocab_size,
                counts_V,
                state.dataset_counts,
                state.group_targets(self._config.targets_per_row()),
                asked_V,
            )

        def score(scoring: ScoreRequest) -> Scores:
            if interrupted():
                raise _InterruptedError
            scores: Scores = engine.evaluate(scoring)
            return scores

        try:
            return self._text.evaluate(score, bias_V, self._device)
        except _InterruptedError:
            return None


class _InterruptedError(Exception):
    """On the way out of an evaluation that is not to be finished."""
