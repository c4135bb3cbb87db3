"""From a run's config to its freshly initialised `Pretraining`; serves training, evaluation and conversion."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megahead.config import RunConfig
from megahead.models import build_backbone, initial_value, initialize_
from megahead.pretraining.output_layers import MaskHead, OutputEmbedding
from megahead.pretraining.pretraining import Pretraining
from megahead.pretraining.temperature import LearnedTemperature


def assemble(config: RunConfig) -> Pretraining:
    """The modules on torch's current default device, weights undefined; on `meta` it costs nothing."""
    model, objective = config.model, config.objective
    head = OutputEmbedding(model.padded_vocab_size(), model.hidden_size) if objective.trains_head() else None
    mask_head = MaskHead(model) if model.is_encoder() and objective.has_vocabulary_softmax() else None
    return Pretraining(build_backbone(model), objective, model.vocab_size, head, mask_head)


def build(config: RunConfig, device: torch.device) -> Pretraining:
    """The run's model on `device`, each parameter drawn from (config.seed, its name) alone."""
    with torch.device("meta"):
        pretraining = assemble(config)
    pretraining = pretraining.to_empty(device=device)
    initialize_(pretraining, config.seed, config.model)
    if pretraining.temperature is not None:
        pretraining.temperature.reset_()
    return pretraining


def weight_shapes(config: RunConfig) -> dict[str, torch.Size]:
    """Of every parameter of `build`, by name."""
    with torch.device("meta"):
        return {name: parameter.shape for name, parameter in assemble(config).named_parameters()}


def first_weights(config: RunConfig) -> Callable[[str], Tensor]:
    """From a parameter's name to the whole fp32 CPU tensor it starts from in `build`, drawn when it is asked for."""
    shapes = weight_shapes(config)

    def weight(name: str) -> Tensor:
        if name == "temperature.log_value":
            return LearnedTemperature(config.objective.temperature).first_value()
        return initial_value(name, shapes[name], config.seed, config.model)

    return weight
