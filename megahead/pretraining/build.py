"""A run's model as plain (unsharded) modules, and the weights that it starts from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megahead.config import ModelConfig, RunConfig
from megahead.models import build_backbone, initial_blocks, initial_value
from megahead.pretraining.detection import Detection
from megahead.pretraining.output_layers import MaskHead, OutputBias, OutputEmbedding
from megahead.pretraining.pretraining import Pretraining
from megahead.pretraining.temperature import LearnedTemperature

TEMPERATURE = "temperature.log_value"
GENERATOR = "detection.generator."


def build_pretraining(config: RunConfig) -> Pretraining:
    """The full model on torch's default device, weights undefined; runs use `parallel.assemble`, which shards it."""
    model, objective = config.trained_model(), config.objective
    head = OutputEmbedding(model.padded_vocab_size(), model.hidden_size) if objective.trains_head() else None
    mask_head = MaskHead(model) if model.is_encoder() and objective.has_mask_head() else None
    output_bias = OutputBias(model.padded_vocab_size()) if objective.output_bias else None
    layers = head, mask_head, output_bias, _detection(config)
    return Pretraining(build_backbone(model), objective, model.vocab_size, *layers)


def _detection(config: RunConfig) -> Detection | None:
    generator, asked = config.generator(), config.objective.replaced_tokens
    return None if generator is None or asked is None else Detection(generator, asked.weight)


def weight_shapes(config: RunConfig) -> dict[str, torch.Size]:
    """Shapes of all parameters of the full (unsharded) model, by name."""
    with torch.device("meta"):
        return {name: parameter.shape for name, parameter in build_pretraining(config).named_parameters()}


@dataclass(frozen=True)
class FirstWeights:
    """What the parameters of a new run start from, by name: full fp32 CPU tensors.

    Each is drawn when it is asked for, and depends only on `config.seed` and its name.
    """

    config: RunConfig
    shapes: Mapping[str, torch.Size]

    def read(self, name: str, /) -> Tensor:
        """All of one."""
        if name == TEMPERATURE:
            return LearnedTemperature(self.config.objective.temperature).first_value()
        return initial_value(name, self.shapes[name], self.config.seed, self._model_of(name))

    def blocks(self, name: str, /) -> Iterator[Tensor]:
        """The same bits in blocks of rows."""
        if name == TEMPERATURE:
            return iter([self.read(name)])
        return initial_blocks(name, self.shapes[name], self.config.seed, self._model_of(name))

    def _model_of(self, name: str) -> ModelConfig:
        """The one whose parameter it is, and on whose depth its first value may depend."""
        generator = self.config.generator() if name.startswith(GENERATOR) else None
        return generator or self.config.trained_model()


def first_weights(config: RunConfig) -> FirstWeights:
    """Those of a run of `config`; draws nothing."""
    return FirstWeights(config, weight_shapes(config))
