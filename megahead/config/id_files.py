"""Files that say something of each id: named where they are used, and nowhere else."""

from __future__ import annotations

from megahead.config.data import DataConfig
from megahead.config.masking import MaskingConfig
from megahead.config.objective import ObjectiveConfig
from megahead.errors import ConfigError


def check_id_files(data: DataConfig, masking: MaskingConfig | None, objective: ObjectiveConfig) -> None:
    """ConfigError where one is missing, or is read by nothing."""
    similar = masking is not None and masking.similar_share > 0
    if (similar or objective.nearest) and data.nearest_ids is None:
        rule = f"be given with {'masking.similar_share' if similar else 'objective.nearest'}"
        raise ConfigError("data.nearest_ids", rule, got="missing", hint="make one: megahead nearest-ids")
    if data.nearest_ids is not None and not similar and not objective.nearest:
        rule = "be left out without masking.similar_share and objective.nearest"
        raise ConfigError("data.nearest_ids", rule, got=data.nearest_ids)
    weighed = masking is not None and masking.reads_weights()
    if weighed != (data.id_weights is not None):
        rule = f"be {'given with' if weighed else 'left out without'} masking.strategy or masking.dropping.by: weights"
        raise ConfigError("data.id_weights", rule, got="missing" if weighed else data.id_weights)
