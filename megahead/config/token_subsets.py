"""Layers of an encoder that compute a part of each row: settings, checks, cost and words.

Three features have such layers: mask tokens that enter late, mask tokens in a decoder behind the model (MAE-LM), and
token dropping.
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

SUBSET_FIELDS = ("masks_from_layer", "mask_decoder_layers", "dropping")
"""Fields of `masking` that ask for such layers."""


class DroppingConfig(Settings):
    """Token dropping (Hou et al. 2022, arXiv 2203.13240): middle layers compute only each row's important tokens,
    equally many per row. The first of these layers still attends to all. Evaluation, exports and fine-tuning
    compute all tokens."""

    from_layer: int = Field(ge=0)
    """First layer that drops tokens, counted from 0; the paper has half of the layers less one."""

    to_layer: int | None = Field(default=None, ge=1)
    """First layer after it that computes all tokens; the last layer by default."""

    keep_share: float = Field(default=0.5, gt=0, lt=1)
    """Share of each row's tokens that is kept: mask tokens first, then special ones, then the most important. All
    mask tokens fit; under masking.count: bernoulli only as many as expected."""

    by: Literal["hardest", "frequency", "informative", "weights"] = "hardest"
    """Importance of a token: how often the model misses its id (`hardest`, as in masking.strategy), its rarity, its
    information on neighbours, or data.id_weights. Ties are broken at random."""

    def layers(self, model: ModelConfig) -> range:
        """The layers that leave tokens out."""
        return range(self.from_layer, model.num_layers - 1 if self.to_layer is None else self.to_layer)

    def check(self, model: ModelConfig, masking: MaskingConfig) -> None:
        """ConfigError unless `model` can drop tokens so."""
        where, first, layers, late = "masking.dropping", self.from_layer, self.layers(model), masking.masks_from_layer
        rule = f"be at most {model.num_layers - 1}, since the last layer computes all tokens"
        require(layers.stop < model.num_layers, f"{where}.to_layer", rule, got=layers.stop)
        require(layers, f"{where}.from_layer", f"be below to_layer ({layers.stop})", got=first)
        rule = f"be at least masking.masks_from_layer ({late}), before which there are no mask tokens to be kept"
        require(first >= late, f"{where}.from_layer", rule, got=first)
        targets = max(masking.rate, masking.final_rate or 0.0) if masking.mask_share else 0.0
        rule = f"be at least the largest share of targets ({targets:g}), since all may be mask tokens, which are kept"
        require(self.keep_share >= targets, f"{where}.keep_share", rule, got=self.keep_share)


def check_token_subsets(masking: MaskingConfig, config: RunConfig) -> None:
    """ConfigError unless the model has such layers, and all else fits."""
    model, init, late = config.model, config.init, masking.masks_from_layer
    rule = f"be below model.num_layers ({model.num_layers})"
    require(late < model.num_layers, "masking.masks_from_layer", rule, got=late)
    for field, value in masking.changed(*SUBSET_FIELDS).items():
        if config.parallel.sequence:
            refuse(f"masking.{field}", value, "with parallel.sequence, which splits whole rows")
        if masking.mask_share == 0 and field != "dropping":
            refuse(f"masking.{field}", value, "with mask_share: 0, which has no mask tokens")
    if masking.mask_decoder_layers:
        rule = f"be left out of a {model.family}, whose last norm would be the decoder's"
        require(model.family == "bert", "masking.mask_decoder_layers", rule, got=masking.mask_decoder_layers)
        why = "with mask_decoder_layers, where masks enter behind all of the model's layers"
        refuse("masking.masks_from_layer", late, why)
        why = "with mask_decoder_layers: there are no mask tokens to be kept before it"
        refuse("masking.dropping", masking.dropping and "given", why)
        refuse("init.from_hf", init and init.from_hf, "with masking.mask_decoder_layers, which such a folder lacks")
    if masking.dropping:
        masking.dropping.check(model, masking)


class SubsetLayers(NamedTuple):
    """Some consecutive layers, not the last one."""

    layers: range

    share: float
    """Of a row's tokens that they compute."""

    first_layer_sees_all: bool = False
    """Whether the first of them computes keys and values of all tokens."""

    def saved(self) -> float:
        """How many layers less it is: products of each token with weights, but for keys and values of the first."""
        return len(self.layers) * (1 - self.share)


def subset_layers(config: RunConfig) -> list[SubsetLayers]:
    """Those of a run, in their order; shares on average over it."""
    masking = config.masking
    if masking is None:
        return []
    found = []
    if late := masking.first_masked_layer(config.model):
        masked = masking.mask_share * config.targets_per_row() / config.data.sequence_length
        found.append(SubsetLayers(range(late), 1 - masked))
    if masking.dropping:
        layers, share = masking.dropping.layers(config.model), masking.dropping.keep_share
        found.append(SubsetLayers(layers, share, first_layer_sees_all=True))
    return found


def describe_token_subsets(model: ModelConfig, masking: MaskingConfig) -> list[str]:
    """For the banner."""
    parts = [f"mask tokens from layer {masking.masks_from_layer} on"] if masking.masks_from_layer else []
    if masking.mask_decoder_layers:
        parts.append(f"mask tokens in a decoder of {pluralize(masking.mask_decoder_layers, 'layer')}")
    if masking.dropping:
        layers, share = masking.dropping.layers(model), masking.dropping.keep_share
        parts.append(f"{share:.0%} of the tokens in {format_range('layer', layers)}, by {masking.dropping.by}")
    return parts
