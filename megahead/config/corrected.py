"""Whether `objective.bias: corrected` knows how often each id is a target: where it is one as often as in the text."""

from __future__ import annotations

from megahead.config.masking import MaskingConfig
from megahead.config.objective import ObjectiveConfig
from megahead.errors import ConfigError


def check_corrected(objective: ObjectiveConfig, masking: MaskingConfig | None, is_causal: bool) -> None:
    """ConfigError where masks prefer some ids: the chance of being a candidate, by which a corrected bias divides, is
    computed from the counts of the text, and would be wrong."""
    if objective.bias != "corrected" or masking is None or is_causal:
        return
    other = "objective.phrases" if objective.phrases else f"masking.strategy: {masking.strategy}"
    if objective.phrases or masking.weighs_ids():
        rule = f"be another with {other}, by which ids are targets more or less often than in the text"
        raise ConfigError("objective.bias", rule, got="corrected", hint="take paper or once")
