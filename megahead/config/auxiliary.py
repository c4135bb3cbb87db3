"""The interface of the settings of auxiliary objectives, whose loss is added to the softmax's, and the parts of their
cost and metrics that need no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from megahead.config.base import Settings
from megahead.config.model import ModelConfig

if TYPE_CHECKING:
    from megahead.config.run import RunConfig


class Curve(NamedTuple):
    """A chart of the report."""

    key: str
    """The metric that it shows."""

    title: str
    note: str
    """What stands beside the title."""

    percent: bool = False
    """Whether values are shares, shown in percent."""

    from_zero: bool = False
    """Whether the axis starts at 0."""


class AuxiliarySettings(Settings):
    """Base of the settings of an auxiliary objective. Subclasses override the defaults."""

    weight: float

    metric_prefix: ClassVar[str] = "auxiliary"
    """Its metrics are logged as PREFIX_NAME."""

    needs_all_outputs: ClassVar[bool] = False
    """Whether it needs the hidden states of all tokens, not only of those with targets."""

    num_layers: ClassVar[int] = 0
    """Blocks of its own that read all tokens, for the memory of `megahead estimate`."""

    shares_candidates: ClassVar[bool] = False
    """Whether its targets are predicted among the candidates of the batch's targets, without a lookup of its own."""

    skews_targets: ClassVar[bool] = False
    """Whether it changes how often an id is a target."""

    samples_tokens: ClassVar[bool] = False
    """Whether it samples tokens from the predictions at targets."""

    no_head_reason: ClassVar[str | None] = None
    """Why exports have no head; None if they have one."""

    dense_embedding_reason: ClassVar[tuple[str, str] | None] = None
    """Why the embedding cannot be sharded by rows: (words for the banner, the rest of the error that begins with
    "`engine.embedding` must"). None: it can."""

    main_loss_label: ClassVar[str] = ""
    """Unless empty, the run's loss minus `weight` times this objective's is logged as LABEL_loss."""

    perplexity_prefix: ClassVar[str] = ""
    """What messages write before held-out metrics if another network than the model predicts, as "generator's "."""

    curves: ClassVar[tuple[Curve, ...]] = ()

    implementation: ClassVar[str] = "megahead.objectives.auxiliary:Auxiliary"
    """`module:Class` of the `objectives.auxiliary.Auxiliary` that computes it; the base class adds nothing."""

    def check(self, config: RunConfig) -> None:
        """Raises ConfigError if other settings rule it out."""

    def generator_config(self, model: ModelConfig) -> ModelConfig | None:
        """The shape of a second encoder, which is trained on the targets instead of the model; None by default."""
        return None

    def samples_vocabulary(self) -> bool:
        """Whether it samples from all ids instead of the candidates (`objective.replaced_tokens.draws: vocabulary`), by
        the training-free head, which needs the dataset's token counts."""
        return False

    def targets_per_row(self, sequence_length: int) -> int:
        """Targets of its own in a full row, which the run's softmax predicts."""
        return 0

    def head_blocks(self, model: ModelConfig) -> ModelConfig | None:
        """The shape of its own blocks, which have a final norm, for `megahead estimate`; None by default."""
        return None

    def has_bag_of_words(self) -> bool:
        """Whether each row's largest scores over tokens also predict its set of tokens (DupMAE)."""
        return False

    def head_parameters(self, model: ModelConfig) -> int:
        """Number of parameters beside `head_blocks` and the generator."""
        return 0

    def head_flops(self, model: ModelConfig, sequence_length: int) -> float:
        """FLOPs per token of `head_parameters`, forward and backward."""
        return 0.0

    def describe(self) -> str:
        """Its part of the banner's line on the objective."""
        return ""

    def means(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Metrics by NAME from the sums of a step; by default each sum divided by `count`."""
        count = max(sums.get("count", 0.0), 1.0)
        return {name: value / count for name, value in sums.items() if name != "count"}

    def derived_metrics(self, means: Mapping[str, float]) -> dict[str, float]:
        """Further metrics by full name, computed from the means of all metrics over several steps."""
        own = f"{self.metric_prefix}_loss"
        return (
            {f"{self.main_loss_label}_loss": means["loss"] - self.weight * means[own]} if self.main_loss_label else {}
        )

    def progress_text(self, means: Mapping[str, float]) -> str:
        """Its part of a progress line, from the means of all metrics by full name: next 4.1000  ahead 4.8000"""
        prefix = f"{self.metric_prefix}_"
        named = {name.removeprefix(prefix): mean for name, mean in means.items() if name.startswith(prefix)}
        rest = f"{self.main_loss_label} {means[f'{self.main_loss_label}_loss']:.4f}  " if self.main_loss_label else ""
        return rest + self.evaluation_text(named)

    def evaluation_text(self, means: Mapping[str, float]) -> str:
        """Its part of the line on an evaluation, from its means by NAME."""
        return f"{self.metric_prefix} {means['loss']:.4f}"

    def export_text(self, means: Mapping[str, float]) -> str:
        """Its last evaluation, in words, for an export's model card."""
        return self.evaluation_text(means)
