"""The objective of a benchmark, whose text are the rows at hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megahead.config.run import RunConfig
from megahead.data.loader import open_nearest_ids
from megahead.losses.contrastive import Objective, build_objective

DRAWN = "drawn"
"""In place of a file of nearest ids: others for each id at random, of which a step has as many. They are as seldom the
same for two ids as can be, so that its candidates are no fewer than by any file."""


def rule_of(config: RunConfig, rows: Sequence[np.ndarray[Any, Any]]) -> Objective:
    """The config's; ids are counted in `rows`, int64 with -1 for padding, where it asks how often each is there."""
    objective, size, counts_V = config.objective, config.model.vocab_size, None
    if objective.needs_token_counts():
        ids = np.concatenate([each.reshape(-1) for each in rows])
        counts_V = torch.from_numpy(np.bincount(ids[ids >= 0], minlength=size))
    return build_objective(objective, size, counts_V, _nearest(config))


def _nearest(config: RunConfig) -> Tensor | None:
    """int64 [V, K]: of the config's file, or drawn."""
    asked, path, size = config.objective.nearest, config.data.nearest_ids, config.model.vocab_size
    if not asked or path is None:
        return None
    if path != DRAWN:
        return torch.from_numpy(open_nearest_ids(path, size, asked))
    steps_K = torch.randperm(size - 1, generator=torch.Generator().manual_seed(config.seed))[:asked] + 1
    return (torch.arange(size)[:, None] + steps_K) % size
