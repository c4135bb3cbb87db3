"""From a run's config to its freshly initialised `Pretraining`; serves training, evaluation and conversion."""

from __future__ import annotations

import torch

from megahead.config import RunConfig
from megahead.models import build_backbone, initialize_
from megahead.pretraining.heads import MaskHead, OutputEmbedding
from megahead.pretraining.pretraining import Pretraining


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
