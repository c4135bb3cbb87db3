"""Fine-tunes one model on one task, from its folder to its scores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from megahead.convert import context_length, load_classifier, load_tokenizer_folder
from megahead.evaluate.finetuning.encoding import ExampleEncoder
from megahead.evaluate.finetuning.loading import TaskData
from megahead.evaluate.finetuning.loop import Classifier, EpochScores, fine_tune
from megahead.evaluate.finetuning.settings import FineTuning


@dataclass(frozen=True)
class InitialModel:
    """The model that fine-tuning starts from."""

    name: str
    folder: Path
    """A Hugging Face folder, with the tokenizer."""

    random_weights: bool = False
    """Take only the shape and the tokenizer from the folder: a baseline without pretraining."""


class FineTuningRun:
    """Fine-tunes one model on one task, for any number of seeds; texts are encoded once."""

    def __init__(self, initial_model: InitialModel, data: TaskData, settings: FineTuning) -> None:
        self.initial_model, self.data, self.settings = initial_model, data, settings
        tokenizer = load_tokenizer_folder(initial_model.folder)
        padding = (tokenizer.pad_token_id, tokenizer.get_vocab().get("[PAD]"), 0)
        self._padding = next(token for token in padding if token is not None)
        longest = context_length(initial_model.folder) or settings.max_length
        encoder = ExampleEncoder(tokenizer, min(settings.max_length, longest))
        self._train = encoder.encode(data.train)
        self._evaluation_sets = {name: encoder.encode(examples) for name, examples in data.evaluation_sets.items()}

    def run(self, seed: int) -> Iterator[EpochScores]:
        """Fine-tunes with `seed` for the head (and random weights), the order and dropout; yields after each epoch."""
        torch.manual_seed(seed)
        model = load_classifier(
            self.initial_model.folder,
            self.data.task.outputs(),
            self._padding,
            random_weights=self.initial_model.random_weights,
        )
        model.to("cuda" if torch.cuda.is_available() else "cpu")
        yield from fine_tune(Classifier(model, self.data.task), self._train, self._evaluation_sets, self.settings, seed)
