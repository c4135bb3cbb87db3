"""The head that a vanilla softmax starts with after headless training: the training-free head as parameters.

Scores are `E h / T + b`, with the embedding E or a copy of it, and b the training-free head's bias (log q for the
paper's objective): the first loss of the softmax is the last held-out loss of the headless model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from megahead.checkpoint import Checkpoint
from megahead.convert.source import EMBEDDING, HEAD, OUTPUT_BIAS, TrainedModel
from megahead.distributed import Finite


@dataclass(frozen=True)
class WithNewHead:
    """The tensors of `checkpoint`, all of them finite; where it has no head, also the first values of one, with
    moments of 0."""

    checkpoint: Checkpoint

    def read(self, key: str, /) -> Tensor:
        if self._name_of_new(key) is None:
            return self._saved().read(key)
        return torch.cat(list(self.blocks(key)))

    def blocks(self, key: str, /) -> Iterator[Tensor]:
        name = self._name_of_new(key)
        if name is None:
            return self._saved().blocks(key)
        first = self.checkpoint.blocks(f"weight/{EMBEDDING}") if name == HEAD else iter([first_bias(self.checkpoint)])
        return first if key.endswith(f"weight/{name}") else (torch.zeros_like(block) for block in first)

    def _saved(self) -> Finite:
        return Finite(self.checkpoint, self.checkpoint.folder)

    def _name_of_new(self, key: str) -> str | None:
        """The parameter that `key` is of, if it is in a head that the checkpoint lacks."""
        name = next((name for name in (HEAD, OUTPUT_BIAS) if key.endswith(f"/{name}")), None)
        return None if name is None or f"weight/{name}" in self.checkpoint.names() else name


def first_bias(checkpoint: Checkpoint) -> Tensor:
    """[padded vocabulary]: that of the training-free head; zeros if the model in `checkpoint` needs none."""
    model = TrainedModel.of(checkpoint)
    bias_V = model.training_free_bias()
    return F.pad(bias_V, (0, model.config.model.padded_vocab_size() - len(bias_V)))
