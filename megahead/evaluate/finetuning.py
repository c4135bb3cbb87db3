"""Fine-tunes a classifier on a task."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from megahead.config.training import OptimizerConfig, ScheduleConfig
from megahead.distributed.group import Group
from megahead.errors import UserError
from megahead.evaluate.glue_tasks import Example, FineTuningSettings, Task, TaskData
from megahead.hf.loading import load_classifier, load_tokenizer_folder, read_context_length
from megahead.optim import build_optimizer, learning_rate_ratio, set_learning_rate

Batch = TypeVar("Batch")

# Losses of a batch, and metrics of an evaluation set.

Floats = NDArray[np.float64]

METRICS: Mapping[str, Callable[[Floats, Floats], float]] = {
    "accuracy": accuracy_score,
    "matthews": matthews_corrcoef,
    "f1": lambda labels, predictions: f1_score(labels, predictions, zero_division=0.0),
    "macro_f1": lambda labels, predictions: f1_score(labels, predictions, average="macro", zero_division=0.0),
    "pearson": lambda labels, predictions: pearsonr(labels, predictions).statistic if len(labels) > 1 else np.nan,
    "spearman": lambda labels, predictions: spearmanr(labels, predictions).statistic,
}
"""By name: functions of labels and predictions, with a maximum of 1."""


def compute_metric(metric: str, labels: Floats, predictions: Floats) -> float:
    """Returns a metric of an evaluation set; 0 if it is undefined, as correlations with constant predictions are."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value = float(METRICS[metric](labels, predictions))
    return 0.0 if np.isnan(value) else value


def class_loss(logits_BC: Tensor, classes_B: Tensor, *, balanced: bool) -> Tensor:
    """Returns the mean cross-entropy of a batch; balanced: the mean of the means of each class in the batch."""
    losses_B = F.cross_entropy(logits_BC, classes_B, reduction="none")
    if not balanced:
        return losses_B.mean()
    counts_C = torch.bincount(classes_B, minlength=logits_BC.shape[1])
    return (losses_B / counts_C[classes_B]).sum() / (counts_C > 0).sum()


# Texts are tokenized, concatenated and truncated once, then batched by length and padded.

_BATCHES_PER_BUCKET = 50  # rows are sorted by length within this many batches, which leaves little padding


@dataclass(frozen=True)
class EncodedExample:
    """A tokenized example, one sequence for each choice."""

    sequences: tuple[tuple[list[int], list[int]], ...]
    """Token ids and their token types: 0 for the first text, 1 for the second."""

    label: float

    def length(self) -> int:
        """Tokens of its longest sequence."""
        return max(len(ids) for ids, _ in self.sequences)


class ExampleEncoder:
    """Concatenates a pair of texts: `[CLS] a [SEP] b [SEP]` for encoders, two lines for decoders."""

    def __init__(self, tokenizer: Any, max_length: int) -> None:
        self._tokenizer, self._max_length = tokenizer, max_length
        special_tokens = (tokenizer.cls_token or "[CLS]", tokenizer.sep_token or "[SEP]")
        start, end = map(tokenizer.get_vocab().get, special_tokens)
        if start is not None and end is not None:
            self._prefix, self._separator, self._suffix = [start], [end], [end]
        else:
            self._prefix, self._separator, self._suffix = [], self._tokenize(["\n"])[0], []

    def encode(self, examples: Sequence[Example]) -> list[EncodedExample]:
        """Tokenizes all examples."""
        first_ids = self._tokenize([example.first_text for example in examples])
        second_texts = (text for example in examples for text in example.second_texts)
        second_ids = iter(self._tokenize([text for text in second_texts if text is not None]))
        encoded = []
        for example, first in zip(examples, first_ids, strict=True):
            pairs = (None if second is None else next(second_ids) for second in example.second_texts)
            sequences = tuple(self._with_special_tokens(first, second) for second in pairs)
            encoded.append(EncodedExample(sequences, example.label))
        return encoded

    def _with_special_tokens(self, first: list[int], second: list[int] | None) -> tuple[list[int], list[int]]:
        """Returns token ids and token types of a sequence. If two texts are too long, the longer is truncated until
        both are equally long, then both are."""
        available = self._max_length - len(self._prefix) - len(self._suffix)
        if second is None:
            ids = [*self._prefix, *first[:available], *self._suffix]
            return ids, [0] * len(ids)
        available -= len(self._separator)
        half = available // 2 if len(first) <= len(second) else available - available // 2
        first_length = min(len(first), max(half, available - len(second)))
        second_length = min(len(second), available - first_length)
        first_part = [*self._prefix, *first[:first_length], *self._separator]
        second_part = [*second[:second_length], *self._suffix]
        return first_part + second_part, [0] * len(first_part) + [1] * len(second_part)

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        encoded = self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        ids: list[list[int]] = encoded["input_ids"]
        return ids


def training_batches(lengths: Sequence[int], batch_size: int, generator: torch.Generator) -> Iterator[list[int]]:
    """Yields every row once, in random batches of rows of similar length. At most one batch is smaller."""
    order = torch.randperm(len(lengths), generator=generator).tolist()
    bucket = batch_size * _BATCHES_PER_BUCKET
    buckets = (order[start : start + bucket] for start in range(0, len(order), bucket))
    rows = [row for rows in buckets for row in sorted(rows, key=lambda row: -lengths[row])]
    batches = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
    yield from (batches[row] for row in torch.randperm(len(batches), generator=generator).tolist())


def collate(examples: Sequence[EncodedExample], padding: int, device: torch.device) -> dict[str, Tensor]:
    """`input_ids`, `attention_mask` and `token_type_ids`, [examples x choices, longest], padded on the right."""

    def pad(rows: Iterable[list[int]], value: int = 0) -> Tensor:
        tensors = [torch.tensor(row, dtype=torch.long) for row in rows]
        return pad_sequence(tensors, batch_first=True, padding_value=value).to(device)

    ids, token_types = zip(*(sequence for example in examples for sequence in example.sequences), strict=True)
    attention_mask = pad([1] * len(row) for row in ids)
    return {"input_ids": pad(ids, padding), "attention_mask": attention_mask, "token_type_ids": pad(token_types)}


# The training loop: each epoch ends with an evaluation on all sets.


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
        self.model, self.task, self.device = model, task, model.device
        self._padding = model.config.pad_token_id
        self._has_token_types = getattr(model.config, "type_vocab_size", 0) > 1

    def outputs(self, examples: Sequence[EncodedExample]) -> Tensor:
        """[B, C] fp32: a score for each class or choice, or the value of a regression."""
        inputs = collate(examples, self._padding, self.device)
        if not self._has_token_types:
            del inputs["token_type_ids"]
        logits: Tensor = self.model(**inputs).logits.float()
        return logits.view(len(examples), -1)

    def loss(self, examples: Sequence[EncodedExample], *, balanced: bool) -> Tensor:
        """Returns the loss of a batch, a scalar."""
        outputs_BC = self.outputs(examples)
        labels_B = torch.tensor([example.label for example in examples], device=self.device)
        if not self.task.labels:
            return F.mse_loss(outputs_BC[:, 0], labels_B)
        return class_loss(outputs_BC, labels_B.long(), balanced=balanced)

    @torch.no_grad()
    def scores(self, examples: Sequence[EncodedExample], batch_size: int) -> dict[str, float]:
        """Returns the task's metrics on an evaluation set."""
        self.model.eval()
        rows = sorted(range(len(examples)), key=lambda row: -examples[row].length())
        predictions, labels = np.zeros(len(examples)), np.array([example.label for example in examples])
        for start in range(0, len(rows), batch_size):
            batch = rows[start : start + batch_size]
            outputs_BC = self.outputs([examples[row] for row in batch])
            predictions[batch] = (outputs_BC.argmax(1) if self.task.labels else outputs_BC[:, 0]).cpu().numpy()
        metrics = (self.task.metric, *self.task.extra_metrics)
        return {metric: compute_metric(metric, labels, predictions) for metric in metrics}


def train_epochs(
    module: nn.Module,
    batches: Callable[[], Iterable[Batch]],
    steps_per_epoch: int,
    compute_loss: Callable[[Batch], Tensor],
    compute_scores: Callable[[], Mapping[str, Mapping[str, float]]],
    settings: FineTuningSettings,
    group: Group = Group(),  # noqa: B008 # frozen
) -> Iterator[EpochScores]:
    """Trains `module` in place on `batches()` in every epoch, and yields after each one.

    On several ranks the batch's loss is the sum of the ranks' losses, and all ranks make the same step. UserError after
    an epoch whose loss is not finite.
    """
    steps = settings.epochs * steps_per_epoch
    schedule = ScheduleConfig(name="constant", warmup_steps=math.ceil(settings.warmup * steps))
    rate, decay = settings.learning_rate, settings.weight_decay
    optimizer_config = OptimizerConfig(learning_rate=rate, betas=(0.9, 0.999), weight_decay=decay)
    optimizer = build_optimizer(module, optimizer_config)
    step = 0
    for _ in range(settings.epochs):
        start, losses = time.monotonic(), []
        module.train()
        for batch in batches():
            loss = compute_loss(batch)
            loss.backward()
            for parameter in module.parameters():
                if parameter.grad is not None:
                    group.all_reduce_(parameter.grad)
            torch.nn.utils.clip_grad_norm_(module.parameters(), settings.gradient_clipping)
            ratio = learning_rate_ratio(schedule, step, steps)
            set_learning_rate(optimizer.param_groups, rate * ratio)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(group.all_reduce_(loss.detach().clone()))
            step += 1
        losses_S = torch.stack(losses)
        if not losses_S.isfinite().all():
            first = int(losses_S.isfinite().int().argmin())
            at = f"is {losses_S[first]:g} at step {step - len(losses) + first + 1}"
            raise UserError(f"The loss must be finite, but {at}; lower --learning-rate.")
        seconds = time.monotonic() - start
        yield EpochScores(float(losses_S.mean()), compute_scores(), seconds)


# One model on one task, from its folder to its scores.


@dataclass(frozen=True)
class InitialModel:
    """The model that fine-tuning starts from."""

    name: str
    folder: Path
    """A Hugging Face folder, with the tokenizer."""

    random_weights: bool = False
    """Use only the config and the tokenizer of the folder: a baseline without pretraining."""


class FineTuningRun:
    """Fine-tunes one model on one task, for any number of seeds; texts are encoded once."""

    truncation_note = ""
    """As of a `ContrastiveRun`; here truncated texts are not reported."""

    def __init__(self, initial_model: InitialModel, data: TaskData, settings: FineTuningSettings) -> None:
        self.initial_model, self.data, self.settings = initial_model, data, settings
        tokenizer = load_tokenizer_folder(initial_model.folder)
        self._padding = tokenizer.pad_token_id or 0
        context_length = read_context_length(initial_model.folder) or settings.max_length
        encoder = ExampleEncoder(tokenizer, min(settings.max_length, context_length))
        self._train = encoder.encode(data.train)
        self._evaluation_sets = {name: encoder.encode([*examples]) for name, examples in data.evaluation_sets.items()}

    def run(self, seed: int) -> Iterator[EpochScores]:
        """Fine-tunes with `seed` for the head (and random weights), the order and dropout; yields after each epoch.
        UserError after an epoch whose loss is not finite."""
        torch.manual_seed(seed)
        initial, num_outputs = self.initial_model, self.data.task.num_outputs()
        model = load_classifier(initial.folder, num_outputs, self._padding, random_weights=initial.random_weights)
        model.to("cuda" if torch.cuda.is_available() else "cpu")
        classifier, size, train = Classifier(model, self.data.task), self.settings.batch_size, self._train
        order = torch.Generator().manual_seed(seed)
        lengths = [example.length() for example in train]

        def batches() -> Iterator[list[EncodedExample]]:
            yield from ([train[row] for row in rows] for rows in training_batches(lengths, size, order))

        def scores() -> dict[str, dict[str, float]]:
            return {name: classifier.scores(rows, 2 * size) for name, rows in self._evaluation_sets.items()}

        loss = partial(classifier.loss, balanced=self.settings.loss == "balanced")
        yield from train_epochs(model, batches, math.ceil(len(train) / size), loss, scores, self.settings)
