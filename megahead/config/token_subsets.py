"""Layers of an encoder that compute only some tokens of each row: settings, checks, cost and banner.

Three features have such layers: mask tokens from a later layer on, mask tokens in a decoder after the model (MAE-LM),
and token dropping.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from pydantic import Field

from megahead.config.base import Settings, refuse, require
from megahead.config.model import ModelConfig
from megahead.wording import format_range, pluralize

if TYPE_CHECKING:
    from megahead.config.masking import MaskingConfig
    from megahead.config.run import RunConfig

TOKEN_SUBSET_FIELDS = ("masks_from_layer", "mask_decoder_layers", "dropping")
"""Fields of `masking` that give a model such layers."""


class DroppingConfig(Settings):
    """Token dropping (arXiv 2203.13240): middle layers compute only each row's important tokens (docs/masking.md)."""

    from_layer: int = Field(ge=0)
    """First layer that drops tokens, counted from 0; the paper has half of the layers less one."""

    to_layer: int | None = Field(default=None, ge=1)
    """First layer after it that computes all tokens; the last layer by default."""

    keep_share: float = Field(default=0.5, gt=0, lt=1)
    """Share of each row's tokens that is kept: mask tokens first, then special ones, then the most important."""

    by: Literal["hardest", "frequency", "informative", "weights"] = "hardest"
    """Importance of a token: how often the model misses its id (`hardest`), its rarity, its information on neighbours,
    or data.id_weights."""

    def layers(self, model: ModelConfig) -> range:
        """The layers that drop tokens."""
        return range(self.from_layer, model.num_layers - 1 if self.to_layer is None else self.to_layer)

    def check(self, model: ModelConfig, masking: MaskingConfig) -> None:
        """Raises ConfigError if `model` cannot drop tokens in these layers, or mask tokens would be dropped."""
        section, layers, first_masked = "masking.dropping", self.layers(model), masking.masks_from_layer
        rule = f"be at most {model.num_layers - 1}, since the last layer computes all tokens"
        require(layers.stop < model.num_layers, f"{section}.to_layer", rule, got=layers.stop)
        require(layers, f"{section}.from_layer", f"be below to_layer ({layers.stop})", got=self.from_layer)
        rule = (
            f"be at least masking.masks_from_layer ({first_masked}), before which there are no mask tokens to be kept"
        )
        require(self.from_layer >= first_masked, f"{section}.from_layer", rule, got=self.from_layer)
        max_rate = max(masking.rate, masking.final_rate or 0.0) if masking.mask_share else 0.0
        rule = f"be at least the largest share of targets ({max_rate:g}), since all may be mask tokens, which are kept"
        require(self.keep_share >= max_rate, f"{section}.keep_share", rule, got=self.keep_share)


def check_token_subsets(masking: MaskingConfig, config: RunConfig) -> None:
    """Raises ConfigError unless the model has the layers of these features, and other settings allow them."""
    model, init, first_masked = config.model, config.init, masking.masks_from_layer
    rule = f"be below model.num_layers ({model.num_layers})"
    require(first_masked < model.num_layers, "masking.masks_from_layer", rule, got=first_masked)
    for field, value in masking.changed(*TOKEN_SUBSET_FIELDS).items():
        if config.parallel.sequence:
            refuse(f"masking.{field}", value, "with parallel.sequence, which splits whole rows")
        if masking.mask_share == 0 and field != "dropping":
            refuse(f"masking.{field}", value, "with mask_share: 0, which has no mask tokens")
    if masking.mask_decoder_layers:
        rule = f"be left out of a {model.family}, whose last norm would be the decoder's"
        require(model.family != "modernbert", "masking.mask_decoder_layers", rule, got=masking.mask_decoder_layers)
        why = "with mask_decoder_layers, where mask tokens enter after the model's last layer"
        refuse("masking.masks_from_layer", first_masked, why)
        why = "with mask_decoder_layers: there are no mask tokens to be kept before it"
        refuse("masking.dropping", masking.dropping and "given", why)
        refuse("init.from_hf", init and init.from_hf, "with masking.mask_decoder_layers, which such a folder lacks")
    if masking.dropping:
        masking.dropping.check(model, masking)


class SubsetLayers(NamedTuple):
    """Consecutive layers, without the last one, that compute some tokens of each row."""

    layers: range

    share: float
    """Share of a row's tokens that they compute."""

    first_layer_attends_to_all: bool = False
    """Whether the first of them computes keys and values of all tokens."""

    def skipped_layers(self) -> float:
        """The cost that is saved, as a number of full layers. Counts products with weights, and ignores
        `first_layer_attends_to_all`."""
        return len(self.layers) * (1 - self.share)


def subset_layers(config: RunConfig) -> list[SubsetLayers]:
    """The layers of a run that compute some tokens, in order; shares are means over the run."""
    masking = config.masking
    if masking is None:
        return []
    subsets = []
    if first_masked := masking.first_masked_layer(config.model):
        masked_share = masking.mask_share * config.targets_per_row() / config.data.sequence_length
        subsets.append(SubsetLayers(range(first_masked), 1 - masked_share))
    if masking.dropping:
        layers, share = masking.dropping.layers(config.model), masking.dropping.keep_share
        subsets.append(SubsetLayers(layers, share, first_layer_attends_to_all=True))
    return subsets


def describe_token_subsets(model: ModelConfig, masking: MaskingConfig) -> list[str]:
    """The banner's parts about these layers."""
    parts = [f"mask tokens from layer {masking.masks_from_layer} on"] if masking.masks_from_layer else []
    if masking.mask_decoder_layers:
        parts.append(f"mask tokens in a decoder of {pluralize(masking.mask_decoder_layers, 'layer')}")
    if masking.dropping:
        layers, share = masking.dropping.layers(model), masking.dropping.keep_share
        parts.append(f"{share:.0%} of the tokens in {format_range('layer', layers)}, by {masking.dropping.by}")
    return parts
