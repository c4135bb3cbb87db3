"""Evaluation during training: on held-out text, and on tasks."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import cast

import torch

from megahead.checkpoints.format import run_on_first_rank
from megahead.config.run import RunConfig
from megahead.config.training import TasksConfig
from megahead.data.indexed import IndexedDataset
from megahead.data.samples import held_out_samples
from megahead.distributed.group import Group
from megahead.engine.engine import Engine
from megahead.evaluate.perplexity import ValidationResult, ValidationSet
from megahead.evaluate.results import TaskResult
from megahead.losses.candidates import evaluation_target_counts, training_free_bias
from megahead.losses.softmax import EvaluationSums
from megahead.objectives.micro_batch import EvaluationRequest
from megahead.run_folder import RunFolder
from megahead.train.preflight import find_task_files
from megahead.train.progress import TrainingState


class Evaluation:
    """Evaluates the validation dataset; in a headless run with the training-free head. For the paper's objective the
    head's bias is log q, where q is the distribution of the targets so far, smoothed with the dataset's counts; or q is
    the dataset's distribution, if training masks rare tokens more often than evaluation."""

    def __init__(self, config: RunConfig, validation: IndexedDataset, data_group: Group, device: torch.device) -> None:
        self.head, self._config, self._data_group, self._device = config.objective.head(), config, data_group, device
        samples = held_out_samples(validation, config.sample_length())
        self._validation_set = ValidationSet.from_config(config, samples, data_group)

    def run(self, engine: Engine, state: TrainingState, should_stop: Callable[[], bool]) -> ValidationResult | None:
        """The result; None once `should_stop()`, which is called every few batches, is true. Collective."""
        bias_V = None
        if self.head == "pmi":
            counts_V = state.target_counts(self._data_group)
            evaluation_counts_V = evaluation_target_counts(self._config, state.dataset_counts)
            objective, vocab_size = self._config.objective, self._config.model.vocab_size
            targets = state.group_targets(self._config.targets_per_row())
            counts = counts_V, state.dataset_counts, targets, evaluation_counts_V
            bias_V = training_free_bias(objective, vocab_size, *counts)

        def score(request: EvaluationRequest) -> EvaluationSums:
            if should_stop():
                raise _InterruptedError
            return cast(EvaluationSums, engine.evaluate(request))

        try:
            return self._validation_set.evaluate(score, bias_V, self._device)
        except _InterruptedError:
            return None


class _InterruptedError(Exception):
    """Ends an evaluation early."""


class TaskEvaluation:
    """The tasks of a run. Creating it checks their files, so that a mistake is an error before training."""

    def __init__(self, config: TasksConfig, world_group: Group, *, is_encoder: bool) -> None:
        self.interval, self._limit, self._world_group = config.every, config.limit, world_group
        self._files = find_task_files(config, is_encoder)

    def run(self, checkpoint: Path) -> list[TaskResult]:
        """Results of all tasks in their order, for the model in `checkpoint` with the best head it has. Collective.
        Rank 0 exports the model, rank r of W evaluates tasks r, r + W, ... in fp32, and rank 0 removes the export. Does
        not restore torch's random state, since every step sets its seed. CheckpointError if the export fails."""
        from megahead.evaluate.harness import evaluate_tasks  # imports transformers: seconds

        folder = RunFolder.of(checkpoint).exports / "evaluated"
        run_on_first_rank(self._world_group, lambda: _export(checkpoint, folder))
        rank_files = dict(list(self._files.items())[self._world_group.rank :: self._world_group.size])
        rank_results = list(evaluate_tasks(folder, rank_files, limit=self._limit)) if rank_files else []
        results = chain.from_iterable(self._world_group.all_gather_objects(rank_results))
        if self._world_group.rank == 0:
            shutil.rmtree(folder)
        result_by_task = {result.task: result for result in results}
        return [result_by_task[name] for name in self._files]


def _export(checkpoint: Path, folder: Path) -> None:
    from megahead.hf.export import export
    from megahead.hf.heads import best_head
    from megahead.hf.trained import TrainedModel

    export(checkpoint, folder, best_head(TrainedModel.open(checkpoint)))
