"""Evaluation during training: held-out text, scored with the objective's head.

A headless objective trains no head over the vocabulary. Its *training-free head* (`pmi`) is made of the input
embeddings and a bias from counted token frequencies.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megahead.config import RunConfig
from megahead.corpus import IndexedDataset
from megahead.data import evaluation_target_counts, held_out_masker, held_out_samples
from megahead.distributed import Group
from megahead.engine import Engine
from megahead.evaluate import ValidationResult, ValidationSet
from megahead.objectives import EvaluationSums, training_free_bias
from megahead.pretraining import EvaluationRequest
from megahead.train.state import TrainingState


class Evaluation:
    """Scores the validation dataset; in a headless run with the training-free head.

    For the paper's objective its bias is log q, where q is the distribution of the targets so far, smoothed with the
    dataset's counts. If training masks rare tokens more often than held-out rows do, q is the dataset's distribution.
    """

    def __init__(self, config: RunConfig, validation: IndexedDataset, data_group: Group, device: torch.device) -> None:
        self.head = config.objective.head()
        self._config = config
        samples = held_out_samples(validation, config.sample_length())
        rows, masker = config.training.evaluate_samples, held_out_masker(config)
        self._validation_set = ValidationSet(samples, config.data, rows, config.batch.micro_size, data_group, masker)
        self._data_group = data_group
        self._device = device

    @classmethod
    def of(
        cls, config: RunConfig, validation: IndexedDataset | None, data_group: Group, device: torch.device
    ) -> Evaluation | None:
        """That of a run which has such a dataset."""
        return None if validation is None else cls(config, validation, data_group, device)

    def run(self, engine: Engine, state: TrainingState, interrupted: Callable[[], bool]) -> ValidationResult | None:
        """The result, or None if `interrupted()`, which is called before every few batches, was true. Collective."""
        bias_V = None
        if self.head == "pmi":
            counts_V = state.target_counts(self._data_group)
            evaluation_counts_V = evaluation_target_counts(self._config, state.dataset_counts)
            bias_V = training_free_bias(
                self._config.objective,
                self._config.model.vocab_size,
                counts_V,
                state.dataset_counts,
                state.group_targets(self._config.targets_per_row()),
                evaluation_counts_V,
            )

        def score(request: EvaluationRequest) -> EvaluationSums:
            if interrupted():
                raise _InterruptedError
            scores: EvaluationSums = engine.evaluate(request)
            return scores

        try:
            return self._validation_set.evaluate(score, bias_V, self._device)
        except _InterruptedError:
            return None


class _InterruptedError(Exception):
    """Ends an evaluation early."""
