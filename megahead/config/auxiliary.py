"""What a model may learn beside the softmax over candidates: the settings of such an objective, what is known without
torch of its cost and its numbers in the log, and how an objective of one's own is named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from pydantic import Field, field_validator

from megahead.config.base import Settings, load_class, require_class_path
from megahead.config.model import ModelConfig

if TYPE_CHECKING:
    from megahead.config.run import RunConfig


class Curve(NamedTuple):
    """A chart of the report: of which number in the log, and how it is shown."""

    key: str
    title: str
    note: str
    percent: bool = False
    zero: bool = False


class AuxiliarySettings(Settings):
    """Base of the settings of an auxiliary objective. A subclass overrides what differs from the defaults here."""

    weight: float

    metric: ClassVar[str] = "auxiliary"
    """Its numbers are METRIC_NAME in the log."""

    needs_all_outputs: ClassVar[bool] = False
    """Whether it needs the hidden states of all tokens; else those that have targets."""

    skews_targets: ClassVar[bool] = False
    """Whether it changes how often an id is a target."""

    samples_tokens: ClassVar[bool] = False
    """Whether it draws tokens from the predictions of targets."""

    no_head_reason: ClassVar[str | None] = None
    """Why exports have no head; None where they have one."""

    dense_embedding_reason: ClassVar[tuple[str, str] | None] = None
    """Why the embedding cannot be sharded by rows: what the banner says, and the rule."""

    predictor_label: ClassVar[str] = ""
    """Who predicts held-out targets, where that is not the model: "generator's "."""

    curves: ClassVar[tuple[Curve, ...]] = ()

    def implementation(self) -> str:
        """`module:Class` of the `objectives.auxiliary.Auxiliary` that computes it."""
        raise NotImplementedError

    def check(self, config: RunConfig) -> None:
        """ConfigError unless it goes with the other settings."""

    def generator_config(self, model: ModelConfig) -> ModelConfig | None:
        """The shape of a second encoder, which learns the targets in the model's place; None where there is none."""
        return None

    def token_counts_needed_by(self) -> str | None:
        """The setting, below `objective`, by which the dataset must have token counts; None where it need not."""
        return None

    def samples_vocabulary(self) -> bool:
        """Whether it draws from all ids by the training-free head, and not from the candidates."""
        return False

    def head_parameters(self, model: ModelConfig) -> int:
        """Parameters that it has beside a generator."""
        return 0

    def head_flops(self, model: ModelConfig) -> float:
        """Operations of a token for these, forward and backward."""
        return 0.0

    def describe(self) -> str:
        """Its part of the banner's line on the objective."""
        return ""

    def means(self, sums: Mapping[str, float]) -> dict[str, float]:
        """By NAME: what a step's sums come to. By default each of them for one of `count`."""
        count = max(sums.get("count", 0.0), 1.0)
        return {name: value / count for name, value in sums.items() if name != "count"}

    def derived_metrics(self, means: Mapping[str, float]) -> dict[str, float]:
        """By their names in the log: of several steps, from the means of all that is logged."""
        return {}

    def progress_text(self, means: Mapping[str, float]) -> str:
        """Its part of a progress line, from what is logged: as `held_out`, of all that it logs."""
        own = f"{self.metric}_"
        return self.evaluation_text(
            {name.removeprefix(own): mean for name, mean in means.items() if name.startswith(own)}
        )

    def evaluation_text(self, means: Mapping[str, float]) -> str:
        """What the line on an evaluation says of it; `means` by NAME."""
        return f"{self.metric} {means['loss']:.4f}"

    def export_text(self, means: Mapping[str, float]) -> str:
        """What an export says of its last evaluation."""
        return self.evaluation_text(means)


class CustomConfig(AuxiliarySettings):
    """An auxiliary objective of your own: a class of a file or of an installed package (docs/extending.md)."""

    objective: str
    """`path/to/file.py:Class` or `package.module:Class`, a subclass of megahead.objectives.auxiliary.Auxiliary."""

    weight: float = Field(default=1.0, gt=0)
    """How often its loss counts; the softmax's counts once."""

    settings: dict[str, Any] = Field(default={})
    """What the class reads of `config.objective.custom.settings`."""

    curves: ClassVar = (Curve("auxiliary_loss", "Auxiliary loss", "of an objective of one's own"),)

    @field_validator("objective")
    @classmethod
    def _names_a_class(cls, value: str) -> str:
        return require_class_path("objective", value)

    def implementation(self) -> str:
        return self.objective

    def evaluation_text(self, means: Mapping[str, float]) -> str:
        """For example: auxiliary 4.2310, right 0.3121"""
        others = [f"{name} {mean:.4f}" for name, mean in means.items() if name != "loss"]
        return ", ".join([super().evaluation_text(means), *others])

    @property
    def needs_all_outputs(self) -> bool:  # type: ignore[override]  # a constant of the others
        """As the class says. Imports it, and with it torch."""
        kind = load_class("objective.custom.objective", self.objective)
        return bool(getattr(kind, "needs_all_outputs", False))

    def head_parameters(self, model: ModelConfig) -> int:
        """Imports the class, and with it torch."""
        kind = load_class("objective.custom.objective", self.objective)
        return int(getattr(kind, "head_parameters", lambda _: 0)(model))  # another class is refused where it is built
