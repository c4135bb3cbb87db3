"""The phrase objective: an encoder finds its masked phrases in the other rows of a group (NPM)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, model_validator

from megahead.config.auxiliary import AuxiliarySettings, Curve
from megahead.config.base import refuse, require
from megahead.wording import pluralize

if TYPE_CHECKING:
    from megahead.config.run import RunConfig


class PhrasesConfig(AuxiliarySettings):
    """Phrases that several rows share are masked, and the outputs at both ends are trained to match those of the same
    phrase in other rows (NPM, arXiv 2212.01349), beside the loss of masked tokens."""

    weight: float = Field(default=1.0, gt=0)
    """Weight of the loss at each end of a masked phrase, relative to that of a masked token."""

    shortest: int = Field(default=2, ge=2)
    """Fewest tokens of a phrase."""

    longest: int = Field(default=10, ge=2)
    """Most tokens of a phrase; the paper has 10."""

    share: float = Field(default=0.5, gt=0, lt=1)
    """Probability mass of phrases in the selection of a row's masked tokens; masking.strategy selects the rest."""

    group_samples: int = Field(default=32, ge=2)
    """Consecutive samples that are searched for shared phrases, a divisor of batch.micro_size. More find more
    phrases, and more negatives."""

    temperature: float | None = Field(default=None, gt=0)
    """Divides products of outputs; by default the square root of model.hidden_size (the paper)."""

    @model_validator(mode="after")
    def _check_lengths(self) -> PhrasesConfig:
        rule = f"be at least shortest ({self.shortest})"
        require(self.longest >= self.shortest, "longest", rule, got=self.longest)
        return self

    implementation: ClassVar = "megahead.objectives.phrases:Phrases"
    metric_prefix: ClassVar = "phrase"
    needs_all_outputs: ClassVar = True
    skews_targets: ClassVar = True
    curves: ClassVar = (
        Curve("phrase_loss", "Phrase loss", "at the ends of masked phrases"),
        Curve("phrase_found", "Masked phrases found", "share of their ends", percent=True, from_zero=True),
    )

    def check(self, config: RunConfig) -> None:
        """Raises ConfigError unless the run masks tokens and each micro-batch has whole groups."""
        masking, micro_size, section = config.masking, config.batch.micro_size, "objective.phrases"
        why = "with phrases, which the model itself learns from the first step to the last"
        refuse("objective.schedule", config.objective.schedule and "given", why)
        masks = masking is not None and not config.model.is_causal
        rule = "be left out where next tokens are learned: phrases are masked in an encoder's rows"
        require(masks, section, rule, got="given")
        diffusion = masking is not None and masking.diffusion
        refuse("masking.diffusion", diffusion, f"with {section}, which are masked whole")
        divides = micro_size % self.group_samples == 0
        require(divides, f"{section}.group_samples", f"divide batch.micro_size ({micro_size})", got=self.group_samples)

    def describe(self) -> str:
        """The phrases' lengths, the rows of a group, and the weight of the loss."""
        lengths, rows = f"{self.shortest} to {self.longest} tokens", pluralize(self.group_samples, "row")
        return f"phrases of {lengths} found among {rows} by outputs of all tokens (weight {self.weight:g})"

    def means(self, sums: Mapping[str, float]) -> dict[str, float]:
        """The loss per phrase end, the share of ends that are found, and the number of ends."""
        ends = max(sums["ends"], 1)
        return {"loss": sums["loss"] / ends, "found": sums["found"] / ends, "ends": sums["ends"]}

    def evaluation_text(self, means: Mapping[str, float]) -> str:
        """For example: phrases 3.1000, found 12.0%"""
        return f"phrases {means['loss']:.4f}, found {means['found']:.1%}"
