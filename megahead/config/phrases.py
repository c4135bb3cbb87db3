"""Phrases as candidates: an encoder finds its masked phrases in the other rows of a group."""

from __future__ import annotations

from pydantic import Field, model_validator

from megahead.config.base import Settings
from megahead.config.batch import BatchConfig
from megahead.config.masking import MaskingConfig
from megahead.config.model import ModelConfig
from megahead.errors import ConfigError


class PhrasesConfig(Settings):
    """After NPM (Min et al. 2023, arXiv 2212.01349): phrases that another row has too are masked, and the outputs at
    both ends of each are learned to be like those where the same phrase stands in other rows, and unlike all others.
    The objective learns the masked tokens beside that."""

    weight: float = Field(default=1.0, gt=0)
    """How often the loss at each end of a masked phrase counts; that of a masked token counts once."""

    shortest: int = Field(default=2, ge=2)
    """Smallest number of tokens in a phrase."""

    longest: int = Field(default=10, ge=2)
    """Largest number of tokens in a phrase; the paper has 10."""

    share: float = Field(default=0.5, gt=0, lt=1)
    """How much the tokens of such phrases weigh in the draw of a row's masked tokens, all others weigh the rest, by
    masking.strategy: about their share of the masked tokens, where a row has so many."""

    group_samples: int = Field(default=32, ge=2)
    """Consecutive samples whose rows are searched for each other's phrases, a divisor of batch.micro_size. More rows
    share more phrases, and have more tokens to tell from these."""

    temperature: float | None = Field(default=None, gt=0)
    """Products of outputs are divided by this; the root of model.hidden_size (the paper) when left out."""

    @model_validator(mode="after")
    def _some_length(self) -> PhrasesConfig:
        if self.longest < self.shortest:
            raise ConfigError("longest", f"be at least shortest ({self.shortest})", got=self.longest)
        return self

    def check(self, model: ModelConfig, masking: MaskingConfig | None, batch: BatchConfig) -> None:
        """ConfigError unless whole phrases can be masked, and each rank has whole groups."""
        if masking is None or model.is_causal:
            rule = "be left out where next tokens are learned: phrases are masked in an encoder's rows"
            raise ConfigError("objective.phrases", rule, got="given")
        if masking.diffusion:
            raise ConfigError(
                "masking.diffusion", "be left out with objective.phrases, which are masked whole", got=True
            )
        if batch.micro_size % self.group_samples:
            rule = f"divide batch.micro_size ({batch.micro_size})"
            raise ConfigError("objective.phrases.group_samples", rule, got=self.group_samples)
