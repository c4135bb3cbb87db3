"""Masked inputs of a decoder (MEAP): which share of what it reads is hidden, and behind which id."""

from __future__ import annotations

from pydantic import Field

from megahead.config.base import Settings
from megahead.config.data import DataConfig
from megahead.config.model import ModelConfig
from megahead.errors import ConfigError


class MaskedInputsConfig(Settings):
    """Some tokens that a decoder reads are replaced by a mask token; what it predicts are the next tokens of the text
    as ever (MEAP: Zhuang et al. 2025, arXiv 2502.07490). Held-out text is read as it is."""

    mask_token: int = Field(ge=0)
    """Id that is read in place of a masked token. It must not occur in the text: that of a tokenizer's mask token, or,
    where it has none, an id beyond the tokenizer's (raise model.vocab_size by one)."""

    share: float = Field(default=0.15, gt=0, lt=1)
    """Share of each row's tokens that are masked; end tokens never are."""

    def check(self, model: ModelConfig, data: DataConfig) -> None:
        """ConfigError unless it is a decoder that reads so, and the mask token one that it has."""
        if model.is_encoder():
            raise ConfigError("masked_inputs", "be left out of an encoder", got="given", hint="it has `masking`")
        if self.mask_token >= model.vocab_size:
            rule = f"be below model.vocab_size ({model.vocab_size})"
            hint = f"for an id beyond the tokenizer's set model.vocab_size={self.mask_token + 1}"
            raise ConfigError("masked_inputs.mask_token", rule, got=self.mask_token, hint=hint)
        if round(self.share * data.sequence_length) == 0:
            rule = f"mask a token of a row of data.sequence_length ({data.sequence_length})"
            hint = f"set at least {1 / data.sequence_length:.2g}, or leave masked_inputs out"
            raise ConfigError("masked_inputs.share", rule, got=self.share, hint=hint)
        if self.mask_token == data.end_token:
            raise ConfigError("masked_inputs.mask_token", "differ from data.end_token", got=self.mask_token)
