"""`engine.precision: auto`: the number format in which the ranks' devices multiply fastest."""

from __future__ import annotations

from typing import Any

import torch

from megahead.config import RunConfig
from megahead.distributed import Group


def settle_precision(config: RunConfig, device: torch.device, ranks: Group) -> RunConfig:
    """`config` with `auto` replaced by bf16 if every rank's device is fast in it, else fp32. Collective for `auto`."""
    if config.engine.precision != "auto":
        return config
    fast = all(ranks.all_gather_objects(multiplies_bf16_fast(device)))
    engine = config.engine.model_copy(update={"precision": "bf16" if fast else "fp32"})
    return config.model_copy(update={"engine": engine})


def multiplies_bf16_fast(device: torch.device) -> bool:
    """Whether products in bf16 are several times as fast as in fp32: on GPUs since Ampere, on CPUs with AMX (measured:
    7 times; a whole step of the demo's decoder 1.6 times). A CPU whose capabilities torch does not know counts as slow.
    """
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return device.type == "cpu" and bool(capabilities.get("amx_bf16"))
