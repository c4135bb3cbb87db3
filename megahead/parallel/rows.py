"""Replaces a model's embedding by a `RowTable`, whose rows are sharded over all ranks (see `table`)."""

from __future__ import annotations

import torch

from megahead.config import RunConfig
from megahead.distributed import Mesh
from megahead.optim import build_row_rule
from megahead.pretraining import Pretraining
from megahead.table import RowTable, SplitRowTable


def place_table_(module: Pretraining, config: RunConfig, mesh: Mesh, device: torch.device) -> RowTable:
    """Replaces the embedding of `module`, whose parameters are hollow, by a table of zeros. Collective over `mesh`."""
    model, settings = config.model, config.optimizer.table
    rule, kind = (
        build_row_rule(settings.rule, config.optimizer),
        SplitRowTable if mesh.tensor_group.size > 1 else RowTable,
    )
    size = model.padded_vocab_size(), model.hidden_size
    placed = kind(*size, rule, mesh, device, settings.learning_rate_ratio)
    module.backbone.register_module("embedding", placed)
    return placed
