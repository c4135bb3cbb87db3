"""Replaced-token detection: an encoder learns which tokens a small generator put in place of masked ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from megahead.config.auxiliary import AuxiliarySettings, Curve
from megahead.config.base import refuse, require
from megahead.config.model import ModelConfig
from megahead.config.token_subsets import SUBSET_FIELDS
from megahead.errors import ConfigError
from megahead.wording import pluralize

if TYPE_CHECKING:
    from megahead.config.run import RunConfig

_SECTION = "objective.replaced_tokens"


class ReplacedTokensConfig(AuxiliarySettings):
    """ELECTRA (arXiv 2003.10555): a generator learns the masked tokens by the run's objective, samples replace them,
    and the model learns which tokens were replaced."""

    generator_layers: int = Field(default=1, gt=0)
    """Blocks of the generator, as wide as the model's (as in COCO-LM, arXiv 2102.08473); it shares the model's
    embedding."""

    draws: Literal["group", "vocabulary"] = "group"
    """headless: what replacements are sampled from. `group`: the candidates of the group, at almost no cost;
    `vocabulary`: all ids, by a product with the whole embedding."""

    weight: float = Field(default=50.0, gt=0)
    """Weight of the detection's loss, a mean over all tokens but special ones; the generator's has 1."""

    implementation: ClassVar = "megahead.objectives.replaced_tokens:ReplacedTokens"
    metric_prefix: ClassVar = "detection"
    rest_label: ClassVar = "generator"
    samples_tokens: ClassVar = True
    predictor_label: ClassVar = "generator's "
    no_head_reason: ClassVar = "detects replaced tokens and predicts no tokens"
    dense_embedding_reason: ClassVar = (
        "replaced tokens are drawn",
        "be `dense` with objective.replaced_tokens, whose held-out tokens are drawn from all ids at once",
    )
    curves: ClassVar = (
        Curve("generator_loss", "Generator's loss", "of masked tokens, where some are replaced"),
        Curve("detection_loss", "Detection loss", "of whether a token was replaced", from_zero=True),
        Curve("detection_found", "Replaced tokens found", "share of them", percent=True, from_zero=True),
    )

    def check(self, config: RunConfig) -> None:
        """Raises ConfigError without masked tokens for the generator, or with a setting that excludes it."""
        objective, model, masking = config.objective, config.model, config.masking
        if masking is None or model.is_causal:
            rule = "be left out where next tokens are learned: those that are replaced are an encoder's masked tokens"
            raise ConfigError(_SECTION, rule, got="given")
        rule = f"be at most model.num_layers ({model.num_layers})"
        is_smaller = self.generator_layers <= model.num_layers
        require(is_smaller, f"{_SECTION}.generator_layers", rule, got=self.generator_layers)
        if objective.name == "vanilla":
            rule = "be left out of a vanilla objective, whose tokens are always drawn from all ids"
            require(self.draws == "group", f"{_SECTION}.draws", rule, got=self.draws)
        _refuse("masking.diffusion", masking.diffusion, "whose model predicts no tokens")
        for field, value in masking.changed(*SUBSET_FIELDS).items():
            _refuse(f"masking.{field}", value, "whose model reads all tokens, and no mask tokens")
        _refuse("masking.noise_share", masking.noise_share, "whose model finds all tokens that are not the text's")
        _refuse("objective.schedule", objective.schedule and "given", "by which generator and model learn side by side")
        _refuse("objective.vanilla_weight", objective.vanilla_weight, "whose generator has one head")
        own = objective.candidates == "own" and "own"
        _refuse("objective.candidates", own, "whose model reads the candidates' rows as inputs")
        from_hf = config.init and config.init.from_hf
        _refuse("init.from_hf", from_hf, "whose generator is in no such folder")
        keep_best = config.training.keep_best
        _refuse("training.keep_best", keep_best, "where held-out loss is the generator's and not the model's")

    def generator_config(self, model: ModelConfig) -> ModelConfig:
        """The model with `generator_layers` layers."""
        return model.model_copy(update={"num_layers": self.generator_layers})

    def samples_vocabulary(self) -> bool:
        return self.draws == "vocabulary"

    def head_parameters(self, model: ModelConfig) -> int:
        """Parameters of the detection head: D^2 + 2 D + 1."""
        return (model.hidden_size + 2) * model.hidden_size + 1

    def head_flops(self, model: ModelConfig, sequence_length: int) -> float:
        """FLOPs of the detection head's transform and score per token: 3 * 2 (D^2 + D)."""
        return 3 * 2 * (model.hidden_size**2 + model.hidden_size)

    def describe(self) -> str:
        """The generator's layers, the candidates for replacements, and the weight of the detection loss."""
        layers = pluralize(self.generator_layers, "layer")
        candidates = ", drawn from all ids" if self.samples_vocabulary() else ""
        return f"learned by a generator of {layers}{candidates}, whose tokens the model finds (weight {self.weight:g})"

    def means(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Detection loss per token, share of replaced tokens, and the recall of replaced (`found`) and of original
        (`kept`) tokens; 0 if there are none."""
        classified, replaced = sums["classified"], sums["replaced"]
        return {
            "loss": sums["loss"] / max(classified, 1),
            "replaced": replaced / max(classified, 1),
            "found": sums["found"] / max(replaced, 1),
            "kept": sums["kept"] / max(classified - replaced, 1),
        }

    def evaluation_text(self, means: Mapping[str, float]) -> str:
        """For example: detection 0.2431, found 48.2% and kept 98.1%"""
        return f"detection {means['loss']:.4f}, found {means['found']:.1%} and kept {means['kept']:.1%}"

    def export_text(self, means: Mapping[str, float]) -> str:
        """For example: 48.2% of replaced tokens found and 98.1% of others kept"""
        return f"{means['found']:.1%} of replaced tokens found and {means['kept']:.1%} of others kept"


def _refuse(field: str, value: object, reason: str) -> None:
    refuse(field, value, f"with {_SECTION}, {reason}")
