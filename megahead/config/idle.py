"""Settings that nothing of a run reads: refused in what a user gives, left out of what checkpoints of a phase hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, get_args

from megahead.config.data import DataConfig
from megahead.config.dropping import DroppingConfig
from megahead.config.masking import FRAMING, MaskingConfig
from megahead.config.model import ModelConfig
from megahead.config.objective import ObjectiveConfig
from megahead.errors import ConfigError

if TYPE_CHECKING:
    from megahead.config.run import RunConfig


_READ_BY: Mapping[str, tuple[str, ...]] = {
    "span_stop": ("span",),
    "longest_span": ("span", "pmi", "whole_word"),
    "frequency_power": ("frequency",),
    "adapt_every": ("hardest",),
    "least_pmi": ("pmi",),
    "least_count": ("pmi", "informative"),
}
"""Fields of `masking`, and the strategies that read them."""

_KEPT_BY = set(get_args(DroppingConfig.model_fields["by"].annotation))
"""Strategies that may also say what `dropping` keeps."""


def check_idle(config: RunConfig) -> None:
    """ConfigError for the first of them."""
    masks, files = _idle_masks(config.model, config.masking), _idle_files(config.data, config.masking, config.objective)
    for section, idle in {"masking": masks, "data": files}.items():
        for field, why in idle:
            got = getattr(getattr(config, section), field)
            raise ConfigError(f"{section}.{field}", f"be left out {why}", got=got)


def without_idle(config: RunConfig) -> RunConfig:
    """With their defaults in their places."""
    masking, changes = config.masking, dict[str, Any]()
    if masking is not None:
        defaults = {field: _default(field) for field, _ in _idle_masks(config.model, masking)}
        changes["masking"] = masking = masking.model_copy(update=defaults)
    files = {field: None for field, _ in _idle_files(config.data, masking, config.objective)}
    return config.model_copy(update=changes | {"data": config.data.model_copy(update=files)})


def _idle_masks(model: ModelConfig, masking: MaskingConfig | None) -> Iterator[tuple[str, str]]:
    """Of `masking`, with why nothing reads them."""
    if masking is None:
        return
    fields = [field for field in MaskingConfig.model_fields if field not in FRAMING]
    for field in fields if model.is_causal else _READ_BY:
        if getattr(masking, field) == _default(field):
            continue
        if model.is_causal:
            yield field, "with model.is_causal: nothing is masked where next tokens are learned"
        elif not masking.weighed_by() & set(_READ_BY[field]):
            kept = " or masking.dropping.by" if _KEPT_BY & set(_READ_BY[field]) else ""
            yield field, f"without masking.strategy{kept}: {' or '.join(_READ_BY[field])}"


def _default(field: str) -> Any:
    return MaskingConfig.model_fields[field].default


def _idle_files(
    data: DataConfig, masking: MaskingConfig | None, objective: ObjectiveConfig
) -> Iterator[tuple[str, str]]:
    """Of `data`, with why nothing reads them: files that say something of each id."""
    similar = masking is not None and masking.similar_share > 0
    if data.nearest_ids is not None and not similar and not objective.nearest:
        yield "nearest_ids", "without masking.similar_share and objective.nearest"
    if data.id_weights is not None and (masking is None or not masking.reads_weights()):
        yield "id_weights", "without masking.strategy or masking.dropping.by: weights"
