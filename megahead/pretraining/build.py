"""A run's model as plain (unsharded) modules, and the weights that it starts from."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megahead.config import RunConfig
from megahead.models import build_backbone, initial_value
from megahead.pretraining.output_layers import MaskHead, OutputEmbedding
from megahead.pretraining.pretraining import Pretraining
from megahead.pretraining.temperature import LearnedTemperature


def build_pretraining(config: RunConfig) -> Pretraining:
    """The full model on torch's default device, weights undefined; runs use `parallel.assemble`, which shards it."""
    model, objective = config.model, config.objective
    head = OutputEmbedding(model.padded_vocab_size(), model.hidden_size) if objective.trains_head() else None
    mask_head = MaskHead(model) if model.is_encoder() and objective.has_vocabulary_softmax() else None
    return Pretraining(build_backbone(model), objective, model.vocab_size, head, mask_head)


def weight_shapes(config: RunConfig) -> dict[str, torch.Size]:
    """Shapes of all parameters of the full (unsharded) model, by name."""
    with torch.device("meta"):
        return {name: parameter.shape for name, parameter in build_pretraining(config).named_parameters()}


def first_weights(config: RunConfig) -> Callable[[str], Tensor]:
    """A function from a parameter's name to the full fp32 CPU tensor that a new run starts from.

    Each is drawn when it is called for, and depends only on `config.seed` and its name.
    """
    shapes = weight_shapes(config)

    def weight(name: str) -> Tensor:
        if name == "temperature.log_value":
            return LearnedTemperature(config.objective.temperature).first_value()
        return initial_value(name, shapes[name], config.seed, config.model)

    return weight
