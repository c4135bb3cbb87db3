"""Encoders that learn next tokens, always or at first: what only masked tokens have is refused beside it."""

from __future__ import annotations

from megahead.config.masking import MaskingConfig
from megahead.config.model import ModelConfig
from megahead.config.objective_schedule import ObjectiveScheduleConfig
from megahead.config.tasks import TasksConfig
from megahead.config.training import TrainingConfig
from megahead.errors import ConfigError

_SHARE = "objective.schedule.causal_share"


def check_causal(
    model: ModelConfig,
    schedule: ObjectiveScheduleConfig | None,
    masking: MaskingConfig | None,
    training: TrainingConfig,
    tasks: TasksConfig | None,
) -> None:
    """ConfigError unless a model can be causal for a share of the run, and all else goes with that."""
    share = schedule.causal_share if schedule else None
    if share is not None and model.is_causal:
        whose = "with model.is_causal: true" if model.is_encoder() else f"of a {model.family}"
        raise ConfigError(_SHARE, f"be left out {whose}, where all steps are causal", got=share)
    if masking is not None and (model.is_causal or share is not None):
        _refuse_what_masked_tokens_have(masking, "model.is_causal" if model.is_causal else _SHARE)
    if tasks and model.is_encoder() and (model.is_causal or share is not None):
        rule = "be left out of a run whose encoder is causal at first or throughout: they are those of masked tokens"
        raise ConfigError("tasks", rule, got="given")
    if share is not None and training.keep_best:
        rule = f"be left out with {_SHARE}: losses of next and of masked tokens cannot be compared"
        raise ConfigError("training.keep_best", rule, got=training.keep_best)


def _refuse_what_masked_tokens_have(masking: MaskingConfig, setting: str) -> None:
    for field in ("masks_from_layer", "mask_decoder_layers"):
        if getattr(masking, field):
            rule = f"be left out with {setting}: nothing is masked where next tokens are learned"
            raise ConfigError(f"masking.{field}", rule, got=getattr(masking, field))
    if masking.dropping:
        rule = f"be left out with {setting}: all tokens have targets where next tokens are learned"
        raise ConfigError("masking.dropping", rule, got="given")
    if masking.adapts():
        rule = f"be one that counts no misses of masked tokens with {setting}, by which there are none at first"
        raise ConfigError("masking.strategy", rule, got=masking.strategy)
