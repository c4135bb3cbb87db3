"""`engine.precision: auto`: the format that the ranks' devices multiply fastest in."""

from __future__ import annotations

from typing import Any

import torch

from megahead.config import RunConfig
from megahead.distributed import Group


def settle_precision(config: RunConfig, device: torch.device, ranks: Group) -> RunConfig:
    """`config` with bf16 for `auto` where every rank's device has units for it, else fp32. Collective for `auto`."""
    if config.engine.precision != "auto":
        return config
    fast = all(ranks.all_gather_objects(multiplies_bf16_fast(device)))
    engine = config.engine.model_copy(update={"precision": "bf16" if fast else "fp32"})
    return config.model_copy(update={"engine": engine})


def multiplies_bf16_fast(device: torch.device) -> bool:
    """Whether products in bf16 are several times as fast as in fp32: on GPUs since Ampere, on CPUs with AMX (measured:
    7 times; a whole step of the demo's decoder 1.6 times). CPUs of which torch does not know what they have count as
    slow."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return device.type == "cpu" and bool(capabilities.get("amx_bf16"))
