"""Layers of a run's encoder that compute a part of each row's tokens alone."""

from __future__ import annotations

from typing import NamedTuple

from megahead.config import RunConfig


class ShorterLayers(NamedTuple):
    """Some consecutive layers, not the last one."""

    layers: range

    share: float
    """Of a row's tokens that they compute."""

    first_reads_all: bool = False
    """Whether the first of them computes keys and values of all tokens."""

    def saved(self) -> float:
        """How many layers less it is: products of each token with weights, but for keys and values of the first."""
        return len(self.layers) * (1 - self.share)


def shorter_layers(config: RunConfig) -> list[ShorterLayers]:
    """Those of a run, in their order; shares on average over it."""
    masking = config.masking
    if masking is None:
        return []
    found = []
    if late := masking.masks_from(config.model):
        masked = masking.mask_share * config.targets_per_row() / config.data.sequence_length
        found.append(ShorterLayers(range(late), 1 - masked))
    if masking.dropping:
        layers, share = masking.dropping.layers(config.model), masking.dropping.keep_share
        found.append(ShorterLayers(layers, share, first_reads_all=True))
    return found
