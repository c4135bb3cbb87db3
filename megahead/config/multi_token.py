"""Multi-token prediction: further heads of a decoder learn tokens further ahead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from megahead.config.auxiliary import AuxiliarySettings, Curve
from megahead.config.base import refuse, require
from megahead.config.model import ModelConfig
from megahead.wording import pluralize

if TYPE_CHECKING:
    from megahead.config.run import RunConfig

_SECTION = "objective.multi_token"


class MultiTokenConfig(AuxiliarySettings):
    """Multi-token prediction (arXiv 2404.19737): parallel heads of one block each read the body's final hidden states
    and predict tokens further ahead, by the run's objective."""

    heads: int = Field(default=1, ge=1)
    """Further heads: head k predicts the token k + 1 ahead. The paper's n is this + 1."""

    weight: float = Field(default=0.3, gt=0)
    """Weight of the heads' loss, a mean over all their tokens; that of next tokens has 1. 0.3 is DeepSeek-V3's (arXiv
    2412.19437)."""

    implementation: ClassVar = "megahead.objectives.multi_token:MultiToken"
    metric_prefix: ClassVar = "ahead"
    rest_label: ClassVar = "next"
    needs_all_outputs: ClassVar = True
    shares_candidates: ClassVar = True
    curves: ClassVar = (
        Curve("next_loss", "Loss of next tokens", "without that of tokens further ahead"),
        Curve("ahead_loss", "Loss of tokens further ahead", "a mean over the heads"),
    )

    @property
    def num_layers(self) -> int:  # type: ignore[override]  # a class variable in the base class
        """A block for each head."""
        return self.heads

    def check(self, config: RunConfig) -> None:
        """Raises ConfigError unless the run is a decoder's, with room for the tokens ahead."""
        rule = "be left out of an encoder: heads read earlier tokens alone"
        require(not config.model.is_encoder(), _SECTION, rule, got="given")
        why = f"with {_SECTION}, whose heads learn from the first step to the last"
        refuse("objective.schedule", config.objective.schedule and "given", why)
        length = config.data.sequence_length
        require(self.heads < length, f"{_SECTION}.heads", f"be below data.sequence_length ({length})", got=self.heads)

    def targets_per_row(self, sequence_length: int) -> int:
        """All tokens of the row for each head: those without a target in their document are computed, too."""
        return self.heads * sequence_length

    def head_blocks(self, model: ModelConfig) -> ModelConfig:
        """A block for each head, and a norm that they share."""
        return model.model_copy(update={"num_layers": self.heads})

    def describe(self) -> str:
        """The number of heads, and the weight of their loss."""
        return f"tokens further ahead by {pluralize(self.heads, 'head')} (weight {self.weight:g})"

    def means(self, sums: Mapping[str, float]) -> dict[str, float]:
        """The loss of all heads, and with several of them that of each."""
        means = {"loss": sums["loss"] / max(sums["count"], 1.0)}
        if self.heads > 1:
            for k in range(1, self.heads + 1):
                means[f"loss_{k + 1}"] = sums[f"loss_{k + 1}"] / max(sums[f"count_{k + 1}"], 1.0)
        return means
