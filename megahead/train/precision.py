"""`engine.precision: auto`: the number format in which the ranks' devices multiply fastest."""

from __future__ import annotations

import torch

from megahead.config import RunConfig
from megahead.distributed import Group, multiplies_bf16_fast


def settle_precision(config: RunConfig, device: torch.device, ranks: Group) -> RunConfig:
    """`config` with `auto` replaced by bf16 if every rank's device is faster so, else fp32. Collective for `auto`."""
    if config.engine.precision != "auto":
        return config
    fast = all(ranks.all_gather_objects(multiplies_bf16_fast(device)))
    engine = config.engine.model_copy(update={"precision": "bf16" if fast else "fp32"})
    return config.model_copy(update={"engine": engine})
