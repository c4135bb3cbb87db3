"""Half precision: DeepSpeed rounds parameters when it starts, so they are given their values only afterwards."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megahead.errors import ConfigError

_FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def half_format(config: dict[str, Any]) -> torch.dtype | None:
    """The half-precision type that DeepSpeed's `config` gives parameters; None for fp32 (also with autocast)."""
    enabled = [dtype for key, dtype in _FORMATS.items() if config.get(key, {}).get("enabled")]
    return enabled[0] if enabled else None


def refuse_half_without_zero(config: dict[str, Any], stage: int) -> None:
    """ConfigError for half precision at stage 0, where DeepSpeed's wrappers train wrongly."""
    for key in _FORMATS:
        if stage == 0 and config.get(key, {}).get("enabled"):
            raise ConfigError(
                "engine.deepspeed.zero_optimization.stage",
                f"be at least 1 with {key}.enabled (at stage 0 DeepSpeed takes a step too many)",
                got=0,
                hint="use stage 1, or torch_autocast",
            )


def allocate_(module: nn.Module) -> None:
    """Gives hollow parameters memory, filled with zeros."""
    for parameter in module.parameters():
        parameter.data = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
