"""Models with their first weights, as a run would start them."""

from __future__ import annotations

import torch
from torch import nn

from megahead.config.model import ModelConfig
from megahead.config.run import RunConfig
from megahead.distributed.group import Group
from megahead.distributed.tensors import FullTensors
from megahead.models.backbone import Backbone
from megahead.models.families import build_backbone, initial_value
from megahead.objectives.pretraining import Pretraining, build_parallel_model, initial_weights, load_weights_


def initialized(config: RunConfig, group: Group | None = None) -> Pretraining:
    """The run's model on the CPU, split over `group`."""
    group = Group() if group is None else group
    module = build_parallel_model(config, group, torch.device("cpu"))
    load_weights_(module, group, initial_weights(config))
    return module


def initialized_backbone(config: ModelConfig, seed: int) -> Backbone:
    """A whole backbone alone, each parameter drawn from the seed and its name."""
    backbone = build_backbone(config)
    initialize_(backbone, seed, config)
    return backbone


def initialize_(module: nn.Module, seed: int, config: ModelConfig) -> None:
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    load_weights_(module, Group(), FullTensors(lambda name: initial_value(name, shapes[name], seed, config)))
