"""`engine.precision: auto`: the number format in which the ranks' devices multiply fastest."""

from __future__ import annotations

from typing import Any

import torch

from megahead.config import RunConfig
from megahead.distributed import Group


def settle_precision(config: RunConfig, device: torch.device, ranks: Group) -> RunConfig:
    """`config` with `auto` replaced by bf16 if every rank's device is faster so, else fp32. Collective for `auto`."""
    if config.engine.precision != "auto":
        return config
    fast = all(ranks.all_gather_objects(multiplies_bf16_fast(device)))
    engine = config.engine.model_copy(update={"precision": "bf16" if fast else "fp32"})
    return config.model_copy(update={"engine": engine})


def multiplies_bf16_fast(device: torch.device) -> bool:
    """Whether training in bf16 is faster than in fp32: on GPUs since Ampere, and on CPUs that multiply bf16, by AMX or
    by AVX-512 (measured: products 7 and 2.4 times as fast, the demo's whole headless step 1.6 and 1.5 times). A CPU
    whose capabilities torch does not know counts as slow."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return device.type == "cpu" and any(capabilities.get(unit) for unit in _BF16_UNITS)


_BF16_UNITS = ("amx_bf16", "avx512_bf16")
