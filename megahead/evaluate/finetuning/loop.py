"""The plain loop that fine-tunes a classifier: an epoch of steps, then all evaluation sets, and again."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megahead.config import OptimizerConfig, ScheduleConfig
from megahead.errors import UserError
from megahead.evaluate.finetuning.encoding import Encoded, by_length, collate, training_batches
from megahead.evaluate.finetuning.scoring import class_loss, measure, number_loss
from megahead.evaluate.finetuning.settings import FineTuning
from megahead.evaluate.finetuning.task_table import Task
from megahead.optim import build_optimizer, learning_rate_ratio, set_learning_rate


@dataclass(frozen=True)
class EpochScores:
    """Loss and scores of an epoch."""

    loss: float
    """Mean training loss over the epoch's batches."""

    scores: Mapping[str, Mapping[str, float]]
    """From evaluation set to metric to value."""

    seconds: float
    """Training time, without evaluation."""


class Classifier:
    """A transformers sequence classifier, with its padding id and whether it has token types."""

    def __init__(self, model: Any, task: Task) -> None:
        self.model = model
        self.task = task
        self.device = model.device
        self._padding = model.config.pad_token_id
        self._has_token_types = getattr(model.config, "type_vocab_size", 0) > 1

    def outputs(self, examples: Sequence[Encoded]) -> Tensor:
        """Scores of each class, of each choice, or the one value of a regression: [B, C] in fp32."""
        inputs = collate(examples, self._padding, self.device)
        if not self._has_token_types:
            del inputs["token_type_ids"]
        logits: Tensor = self.model(**inputs).logits.float()
        return logits.view(len(examples), -1)

    def loss(self, examples: Sequence[Encoded], *, balanced: bool) -> Tensor:
        """The loss of a batch, a scalar."""
        outputs_BC = self.outputs(examples)
        labels_B = torch.tensor([example.label for example in examples], device=self.device)
        if not self.task.labels:
            return number_loss(outputs_BC[:, 0], labels_B)
        return class_loss(outputs_BC, labels_B.long(), balanced=balanced)

    @torch.no_grad()
    def scores(self, examples: Sequence[Encoded], batch_size: int) -> dict[str, float]:
        """The task's metrics on an evaluation set."""
        self.model.eval()
        rows = by_length([example.length() for example in examples], range(len(examples)))
        predictions, labels = np.zeros(len(examples)), np.array([example.label for example in examples])
        for start in range(0, len(rows), batch_size):
            batch = rows[start : start + batch_size]
            outputs_BC = self.outputs([examples[row] for row in batch])
            predictions[batch] = (outputs_BC.argmax(1) if self.task.labels else outputs_BC[:, 0]).cpu().numpy()
        return {metric: measure(metric, labels, predictions) for metric in (self.task.metric, *self.task.also)}


def fine_tune(
    classifier: Classifier,
    train: Sequence[Encoded],
    evaluation_sets: Mapping[str, Sequence[Encoded]],
    settings: FineTuning,
    seed: int,
) -> Iterator[EpochScores]:
    """Trains in place and yields after each epoch. UserError once the loss is no longer finite."""
    order = torch.Generator().manual_seed(seed)
    lengths = [example.length() for example in train]
    steps = settings.epochs * math.ceil(len(train) / settings.batch_size)
    schedule = ScheduleConfig(name="constant", warmup_steps=math.ceil(settings.warmup * steps))
    optimizer = build_optimizer(
        classifier.model,
        OptimizerConfig(learning_rate=settings.learning_rate, betas=(0.9, 0.999), weight_decay=settings.weight_decay),
    )
    step = 0
    for _ in range(settings.epochs):
        begin, losses = time.monotonic(), []
        classifier.model.train()
        for batch in training_batches(lengths, settings.batch_size, order):
            loss = classifier.loss([train[row] for row in batch], balanced=settings.loss == "balanced")
            loss.backward()
            torch.nn.utils.clip_grad_norm_(classifier.model.parameters(), settings.gradient_clipping)
            rate = settings.learning_rate * learning_rate_ratio(schedule, step, steps)
            set_learning_rate(optimizer.param_groups, rate)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            step += 1
        mean = float(torch.stack(losses).mean())
        if not math.isfinite(mean):
            raise UserError(f"The loss must be finite, but is {mean} at step {step}; lower --learning-rate.")
        seconds = time.monotonic() - begin
        scores = {
            name: classifier.scores(examples, 2 * settings.batch_size) for name, examples in evaluation_sets.items()
        }
        yield EpochScores(mean, scores, seconds)
