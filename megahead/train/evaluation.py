"""Evaluation in the middle of training: held-out text, scored with the head the objective has."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megahead.config import RunConfig
from megahead.corpus import IndexedDataset
from megahead.data import held_out_masker, held_out_samples
from megahead.distributed import Group
from megahead.engine import Engine
from megahead.evaluate import HeldOut, HeldOutText
from megahead.objectives import Scores, training_free_bias
from megahead.pretraining import ScoreRequest
from megahead.train.state import TrainingState


class Evaluation:
    """Scores the validation dataset; a headless run uses the bias that needs no training: for the paper's objective
    log q, q counted so far, smoothed by the dataset's."""

    def __init__(self, config: RunConfig, held_out: IndexedDataset, data: Group, device: torch.device) -> None:
        self.head = config.objective.head()
        self._objective = config.objective
        samples = held_out_samples(held_out, config.sample_length())
        rows, masker = config.training.evaluate_samples, held_out_masker(config)
        self._text = HeldOutText(samples, config.data, rows, config.batch.micro_size, data, masker)
        self._data = data
        self._device = device
        self._vocab_size = config.model.vocab_size

    def run(self, engine: Engine, state: TrainingState, interrupted: Callable[[], bool]) -> HeldOut | None:
        """None when `interrupted` says so, which is asked before each batch, alike on all ranks. Collective."""
        bias_V = None
        if self.head == "pmi":
            counts_V = state.target_counts(self._data)
            bias_V = training_free_bias(
                self._objective, self._vocab_size, counts_V, state.dataset_counts, state.group_targets()
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
