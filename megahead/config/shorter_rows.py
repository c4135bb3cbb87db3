"""Layers of an encoder that compute a part of each row: mask tokens that come later, and tokens that are dropped."""

from __future__ import annotations

from megahead.config.init import InitConfig
from megahead.config.masking import MaskingConfig
from megahead.config.model import ModelConfig
from megahead.errors import ConfigError


def check_shorter_rows(masking: MaskingConfig, model: ModelConfig, init: InitConfig | None, splits_rows: bool) -> None:
    """ConfigError unless `model` has such layers, and all else fits; `splits_rows`: sequence parallelism does."""
    if masking.masks_from_layer >= model.num_layers:
        rule = f"be below model.num_layers ({model.num_layers})"
        raise ConfigError("masking.masks_from_layer", rule, got=masking.masks_from_layer)
    for field in ("masks_from_layer", "mask_decoder_layers"):
        value = getattr(masking, field)
        if value and splits_rows:
            rule = "be left out with parallel.sequence, which splits whole rows"
            raise ConfigError(f"masking.{field}", rule, got=value)
        if value and masking.mask_share == 0:
            rule = "be left out with mask_share: 0, which has no mask tokens"
            raise ConfigError(f"masking.{field}", rule, got=value)
    if masking.mask_decoder_layers:
        _check_mask_decoder(masking, model, init)
    if masking.dropping:
        targets = max(masking.rate, masking.final_rate or 0.0) if masking.mask_share else 0.0
        masking.dropping.check(model, targets, masking.masks_from_layer, splits_rows=splits_rows)


def _check_mask_decoder(masking: MaskingConfig, model: ModelConfig, init: InitConfig | None) -> None:
    if model.family != "bert":
        rule = f"be left out of a {model.family}, whose last norm would be the decoder's"
        raise ConfigError("masking.mask_decoder_layers", rule, got=masking.mask_decoder_layers)
    if masking.masks_from_layer:
        rule = "be left out with mask_decoder_layers, where masks enter behind all of the model's layers"
        raise ConfigError("masking.masks_from_layer", rule, got=masking.masks_from_layer)
    if masking.dropping:
        rule = "be left out with mask_decoder_layers: there are no mask tokens to be kept before it"
        raise ConfigError("masking.dropping", rule, got="given")
    if init and init.from_hf:
        rule = "be left out with masking.mask_decoder_layers, which such a folder lacks"
        raise ConfigError("init.from_hf", rule, got=init.from_hf)
