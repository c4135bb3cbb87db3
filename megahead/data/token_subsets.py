"""Layers of an encoder that compute a part of each row: those before mask tokens enter, and those that drop tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from megahead.config.model import ModelConfig
from megahead.data.batch import TokenSelection
from megahead.data.framing import Framing
from megahead.data.indexed import Array
from megahead.data.samples import CounterRng, Purpose
from megahead.data.strategies import STRATEGIES
from megahead.data.strategy import Strategy, TrainingText

# Token dropping: which tokens of masked rows an encoder's middle layers compute (Hou et al. 2022, arXiv 2203.13240).
# The paper keeps a running mean of the masked-LM loss of each id, and the tokens of a row whose ids have the highest;
# special tokens, mask tokens among them, are always kept. What counts is the id that is read: whether a token is a
# target shows in nothing but its mask. Here importance is the weight of a masking strategy, by default the share of
# times that an id was missed (`error_counts`): whole numbers, which are the same on any mesh. B rows, T tokens per row.

_MASK, _SPECIAL, _TEXT, _EMPTY = range(4)  # in the order in which tokens are kept


@dataclass(frozen=True)
class TokenDropping:
    """Keeps as many tokens of each row: mask tokens, then other special ones, then those of the largest weight."""

    framing: Framing
    layers: range
    share: float
    importance: Strategy

    def select(self, read_BT: Array, text: Array, step: int, rng: CounterRng) -> TokenSelection:
        """Of rows that are read so; `text`, int64 [B, T - 2], is negative where a row is empty."""
        length = read_BT.shape[1]
        draw_BT = rng.uniform(Purpose.DROPPING_TIES, length)
        weights_BT = self.importance.at(step).weights(read_BT)
        falling_BT = draw_BT if weights_BT is None else -weights_BT
        order_BT = np.lexsort((draw_BT, falling_BT, self._kinds(read_BT, text)))
        kept_BT = np.zeros(read_BT.shape, bool)
        np.put_along_axis(kept_BT, order_BT[:, : max(1, round(self.share * length))], True, axis=1)
        return TokenSelection.from_mask(kept_BT, self.layers, first_layer_sees_all=True)

    def _kinds(self, read_BT: Array, text: Array) -> Array:
        """int64 [B, T]: which are kept before which."""
        kind_BT = np.where(np.isin(read_BT, self.framing.unmaskable()), _SPECIAL, _TEXT)
        kind_BT[read_BT == self.framing.masking.mask_token] = _MASK
        kind_BT[np.arange(read_BT.shape[1]) > 1 + (text >= 0).sum(1)[:, None]] = _EMPTY
        return kind_BT


@dataclass(frozen=True)
class TokenSubsets:
    """What the layers of a run's encoder compute of its rows."""

    mask_token: int

    first_masked_layer: int = 0
    """The first layer that sees mask tokens."""

    dropping: TokenDropping | None = None
    """What middle layers leave out, if anything."""

    @staticmethod
    def from_settings(framing: Framing, model: ModelConfig, text: TrainingText | None = None) -> TokenSubsets:
        """As the settings ask for; held-out rows, which have no `text` by which tokens are important, drop none."""
        masking, settings = framing.masking, framing.masking.dropping
        if text is None or settings is None:
            return TokenSubsets(masking.mask_token, masking.first_masked_layer(model))
        importance = STRATEGIES[settings.by](masking, replace(text, setting="masking.dropping.by"))
        dropping = TokenDropping(framing, settings.layers(model), settings.keep_share, importance)
        return TokenSubsets(masking.mask_token, masking.first_masked_layer(model), dropping)

    def select(
        self, chosen_BT: Array, read_BT: Array, text: Array, step: int, rng: CounterRng
    ) -> tuple[TokenSelection, ...]:
        """In the order of layers; `chosen_BT`: targets, `read_BT`: what is read."""
        kept = () if self.dropping is None else (self.dropping.select(read_BT, text, step, rng),)
        if self.first_masked_layer:
            mask_BT = chosen_BT & (read_BT == self.mask_token)
            kept = (TokenSelection.from_mask(~mask_BT, range(self.first_masked_layer)), *kept)
        return kept
