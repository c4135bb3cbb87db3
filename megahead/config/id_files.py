"""Files that say something of each id: named where they are used."""

from __future__ import annotations

from megahead.config.data import DataConfig
from megahead.config.masking import MaskingConfig
from megahead.config.objective import ObjectiveConfig
from megahead.errors import ConfigError


def check_id_files(data: DataConfig, masking: MaskingConfig | None, objective: ObjectiveConfig) -> None:
    """ConfigError where one is missing."""
    similar = masking is not None and masking.similar_share > 0
    if (similar or objective.nearest) and data.nearest_ids is None:
        rule = f"be given with {'masking.similar_share' if similar else 'objective.nearest'}"
        raise ConfigError("data.nearest_ids", rule, got="missing", hint="make one: megahead nearest-ids")
    if masking is not None and masking.reads_weights() and data.id_weights is None:
        rule = "be given with masking.strategy or masking.dropping.by: weights"
        raise ConfigError("data.id_weights", rule, got="missing")
