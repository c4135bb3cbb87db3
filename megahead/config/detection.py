"""What goes with replaced-token detection, and what does not."""

from __future__ import annotations

from megahead.config.init import InitConfig
from megahead.config.masking import MaskingConfig
from megahead.config.model import ModelConfig
from megahead.config.objective import ObjectiveConfig
from megahead.config.training import TrainingConfig
from megahead.errors import ConfigError

_WHERE = "objective.replaced_tokens"


def check_detection(
    objective: ObjectiveConfig,
    model: ModelConfig,
    masking: MaskingConfig | None,
    training: TrainingConfig,
    init: InitConfig | None,
) -> None:
    """ConfigError unless there are masked tokens that a generator can fill in, and nothing else is asked of it."""
    asked = objective.replaced_tokens
    if asked is None:
        return
    if masking is None or model.is_causal:
        rule = "be left out where next tokens are learned: those that are replaced are an encoder's masked tokens"
        raise ConfigError(_WHERE, rule, got="given")
    if asked.generator_layers > model.num_layers:
        rule = f"be at most model.num_layers ({model.num_layers})"
        raise ConfigError(f"{_WHERE}.generator_layers", rule, got=asked.generator_layers)
    if objective.name == "vanilla" and asked.draws != "group":
        rule = "be left out of a vanilla objective, whose tokens are always drawn from all ids"
        raise ConfigError(f"{_WHERE}.draws", rule, got=asked.draws)
    _refuse("masking.diffusion", masking.diffusion, "whose model writes no text")
    _refuse("masking.masks_from_layer", masking.masks_from_layer, "whose model reads no mask tokens")
    _refuse("masking.mask_decoder_layers", masking.mask_decoder_layers, "whose model reads no mask tokens")
    _refuse("masking.noise_share", masking.noise_share, "whose model finds all tokens that are not the text's")
    _refuse("masking.dropping", masking.dropping and "given", "whose model judges all tokens")
    _refuse("objective.schedule", objective.schedule and "given", "by which generator and model learn side by side")
    _refuse("objective.vanilla_weight", objective.vanilla_weight, "whose generator has one head")
    _refuse("init.from_hf", init and init.from_hf, "whose generator is in no such folder")
    _refuse("training.keep_best", training.keep_best, "where held-out loss is the generator's and not the model's")


def _refuse(field: str, value: object, reason: str) -> None:
    if value:
        raise ConfigError(field, f"be left out with {_WHERE}, {reason}", got=value)
