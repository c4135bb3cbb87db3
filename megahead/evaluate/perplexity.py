"""Held-out perplexity, bits per byte and accuracy, during training or of a checkpoint with any of its heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from megahead.config.auxiliary import AuxiliarySettings
from megahead.config.objective import HeadName
from megahead.config.run import RunConfig
from megahead.data.batch import RowCollator
from megahead.data.indexed import IndexedDataset
from megahead.data.loader import BatchReader, require_end_tokens
from megahead.data.samples import EvenlySpacedSamples, Samples, held_out_samples
from megahead.distributed.group import Group
from megahead.errors import FieldError
from megahead.hf.heads import require_head
from megahead.hf.trained import TrainedModel
from megahead.losses.softmax import EvaluationSums
from megahead.objectives.auxiliary import held_out_row_collator
from megahead.objectives.micro_batch import EvaluationRequest

# Held-out perplexity, bits per byte and accuracy of a model with its own head, during training or after it.

_MICRO_BATCHES_PER_PASS = 8
"""Micro-batches scored in one pass over the vocabulary. Each pass gathers rows that are split over ranks.
The hidden states need less memory than one micro-batch in training."""


@dataclass(frozen=True)
class ValidationResult:
    """Metrics of a validation set."""

    loss: float
    """Mean negative log-probability of a target in nats; for masked diffusion, of a token that may be masked."""

    perplexity: float
    """exp(loss). Encoders predict masked tokens, decoders and encoders in a causal phase next tokens: the two are not
    comparable."""

    accuracy: float
    """Share of targets that were the most probable token."""

    bits_per_byte: float | None
    """Bits per byte of text, comparable across tokenizers; None if the size of the dataset's text is unknown, or if
    only some tokens are predicted (encoders, except masked diffusion)."""

    upper_bound: bool = False
    """Whether loss, perplexity and bits are upper bounds, as in masked diffusion. Its bound is estimated with one
    random mask per row, and does not count the prediction of special tokens (end tokens included)."""

    auxiliary: Mapping[str, float] | None = None
    """Mean metrics of an auxiliary objective by name, if it is evaluated. In ELECTRA all other metrics are the
    generator's."""


class ValidationSet:
    """`rows` rows of a validation dataset, evenly spread over it, since a file may hold one source after the other;
    scored `micro_size` at a time by the ranks of `group` together."""

    def __init__(
        self,
        samples: Samples,
        collator: RowCollator,
        rows: int,
        micro_size: int,
        group: Group,
        auxiliary: AuxiliarySettings | None = None,
    ) -> None:
        self._samples, self._collator, self._auxiliary = samples, collator, auxiliary
        spaced_samples = EvenlySpacedSamples(samples, rows)
        self._reader, self._rows = BatchReader(spaced_samples, collator), spaced_samples.count
        self._micro_size, self._group = micro_size, group

    @staticmethod
    def from_config(config: RunConfig, samples: Samples, group: Group) -> ValidationSet:
        """Returns the validation set as a run of `config` evaluates it."""
        collator, auxiliary = held_out_row_collator(config), config.objective.auxiliary()
        rows, micro_size = config.training.evaluate_samples, config.batch.micro_size
        return ValidationSet(samples, collator, rows, micro_size, group, auxiliary)

    def evaluate(
        self, score: Callable[[EvaluationRequest], EvaluationSums], bias_V: Tensor | None, device: torch.device
    ) -> ValidationResult:
        """Scores every row once and sums over ranks. Collective; every rank calls `score` equally often.

        `score`: a Pretraining, or the method `evaluate` of an engine. `bias_V` is the head's bias: log q for a headless
        model's training-free head, None for the embedding alone or a head of the model's own.
        """
        totals, names = torch.zeros(1, dtype=torch.float64), list[str]()
        bias = None if bias_V is None else bias_V.to(device)
        for ranges in self._requests():
            batches = tuple(self._reader.read(rows or range(1)).to(device) for rows in ranges)
            *target_sums, auxiliary = score(EvaluationRequest(batches, bias))
            names = list(auxiliary)
            values = torch.tensor([*target_sums, *auxiliary.values()], dtype=torch.float64)
            totals = totals + (values if ranges[0] else torch.zeros_like(values))
        loss, correct, targets, weight, *sums = self._group.all_reduce_(totals).tolist()
        loss, info, bits = loss / max(weight, 1.0), self._samples.dataset.info, None
        predicted = None if info is None else self._collator.num_predicted_tokens(info)
        if info and info.text_bytes and predicted is not None:  # None if only masked tokens count
            # bytes a token of the whole dataset: exact only if all of it was read
            bits = loss / log(2) / (info.text_bytes / max(predicted, 1))
        means = self._auxiliary.means(dict(zip(names, sums, strict=True))) if self._auxiliary and names else None
        accuracy, bound = correct / max(targets, 1), self._collator.loss_is_upper_bound
        return ValidationResult(loss, exp(min(loss, 700.0)), accuracy, bits, bound, means)

    def _requests(self) -> Iterator[list[range]]:
        """Yields for each pass the rows of this rank's micro-batches, equally many on all ranks. The last pass has the
        remaining rows: a rank with an empty range scores a row that does not count."""
        stride = self._micro_size * self._group.size
        steps, num_left = [*range(0, self._rows - stride + 1, stride)], self._rows % stride
        passes = [steps[n : n + _MICRO_BATCHES_PER_PASS] for n in range(0, len(steps), _MICRO_BATCHES_PER_PASS)]
        for first_rows in [*passes, *([[self._rows - num_left]] if num_left else [])]:
            starts = [first + self._group.rank * self._micro_size for first in first_rows]
            yield [range(start, min(start + self._micro_size, self._rows)) for start in starts]


# The held-out dataset of a trained model, in rows of the run's sequence length.


def open_held_out(config: RunConfig, dataset: str | None = None, fingerprint: str | None = None) -> Samples:
    """Opens the run's validation dataset, or `dataset`, a prefix. FieldError without either, or if the tokenizer of the
    dataset is not the one with the `fingerprint` (`TrainedModel.tokenizer_fingerprint`)."""
    prefix = dataset or config.data.validation
    if prefix is None:
        raise FieldError("data.validation", "name a held-out dataset", got="missing", hint="or give one to evaluate on")
    text = IndexedDataset(prefix)
    identity = text.tokenizer_identity()
    if identity is not None and fingerprint not in (None, identity.sha256, f"vocabulary {identity.vocabulary}"):
        rule = "be cut by the tokenizer that the model was trained with"
        raise FieldError("dataset", rule, got=f"{prefix}, cut by {identity}")
    require_end_tokens(config.data, text)
    text.expect_ids_below(config.model.vocab_size)
    return held_out_samples(text, config.sample_length())


# Held-out perplexity of a checkpoint, with any head that it can have.


def evaluate_checkpoint(
    checkpoint: str | PathLike[str], head: HeadName, *, dataset: str | None = None
) -> ValidationResult:
    """Scores the run's validation dataset (or `dataset`, a prefix), as many rows as in the run's own evaluations.

    checkpoint: a step folder, or a run folder for its newest. head: `tied` scores with the embedding alone, `pmi` adds
    log q (the training-free head), `trained` uses the head's own matrix. In fp32 on the CPU.
    """
    return evaluate_on_datasets(checkpoint, head, [dataset])[0]


def evaluate_on_datasets(
    checkpoint: str | PathLike[str], head: HeadName, datasets: Sequence[str | PathLike[str] | None]
) -> list[ValidationResult]:
    """Evaluates several datasets, for example one for each language, with the weights read once."""
    model = TrainedModel.open(Path(checkpoint))
    require_head(head, model)
    fingerprint = model.tokenizer_fingerprint()
    prefixes = [None if prefix is None else str(prefix) for prefix in datasets]
    sample_sets = [open_held_out(model.config, prefix, fingerprint) for prefix in prefixes]
    pretraining = model.load()
    bias_V = model.training_free_bias() if head == "pmi" else None
    validation_sets = [ValidationSet.from_config(model.config, samples, Group()) for samples in sample_sets]
    with torch.no_grad():
        return [each.evaluate(pretraining, bias_V, torch.device("cpu")) for each in validation_sets]
