"""Scaling of rotary embeddings, for longer rows than a model was first trained on (`rope_scaling` in Hugging Face)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from megahead.config.base import Settings
from megahead.errors import ConfigError


class RotaryScalingConfig(Settings):
    """How rotary frequencies are slowed down, for longer rows than the model was first trained on."""

    kind: Literal["linear", "llama3"]
    """Which frequencies are lowered. `linear`: all; `llama3`: those whose wavelength is about original_positions or
    longer (Llama 3.1)."""

    factor: float = Field(ge=1)
    """How many times slower."""

    low_frequency_factor: float = Field(default=1.0, gt=0)
    """llama3: frequencies with fewer turns than this in original_positions are divided by `factor`."""

    high_frequency_factor: float = Field(default=4.0, gt=0)
    """llama3: frequencies with more turns than this in original_positions stay as they are."""

    original_positions: int = Field(default=8192, gt=0)
    """llama3: the longest rows of the first training, in tokens."""

    @model_validator(mode="after")
    def _makes_sense(self) -> RotaryScalingConfig:
        given = self.model_fields_set - {"kind", "factor"}
        foreign = [field for field in given if getattr(self, field) != type(self).model_fields[field].default]
        if self.kind == "linear" and foreign:
            raise ConfigError(foreign[0], "be left out of `linear` scaling", got=getattr(self, foreign[0]))
        if self.low_frequency_factor >= self.high_frequency_factor:
            rule = f"be above low_frequency_factor ({self.low_frequency_factor:g})"
            raise ConfigError("high_frequency_factor", rule, got=f"{self.high_frequency_factor:g}")
        return self
