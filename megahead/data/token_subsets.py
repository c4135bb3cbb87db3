"""Encoder layers that compute a part of each row: those before mask tokens enter, and those that drop tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from megahead.config.model import ModelConfig
from megahead.data.batch import SubsetIndex
from megahead.data.encoder_rows import EncoderRowBuilder
from megahead.data.indexed import Array
from megahead.data.samples import CounterRng, Purpose
from megahead.data.strategies import STRATEGIES
from megahead.data.strategy import Strategy, TrainingText

# Token dropping: which tokens of masked rows an encoder's middle layers compute (Hou et al. 2022, arXiv 2203.13240).
# The paper keeps a running mean of the masked-LM loss of each id, and the tokens of a row whose ids have the highest;
# special tokens, mask tokens among them, are always kept. Importance depends on the input id, so that only masks reveal
# which tokens are targets. Here it is the weight of a masking strategy, by default an id's error rate: a ratio of whole
# numbers (`target_error_counts`), which are the same on any mesh. B rows, T tokens per row.

_MASK, _SPECIAL, _TEXT, _EMPTY = range(4)  # kinds of tokens, in the order in which they are kept


@dataclass(frozen=True)
class TokenDropping:
    """Keeps a share of each row's tokens: mask tokens, then other special ones, then those of the largest weight."""

    row_builder: EncoderRowBuilder
    layers: range
    share: float
    importance: Strategy

    def select(self, input_ids_BT: Array, text: Array, step: int, rng: CounterRng) -> SubsetIndex:
        """The tokens that are kept; `text`, int64 [B, T - 2], is negative where a row is empty."""
        length = input_ids_BT.shape[1]
        draw_BT = rng.uniform(Purpose.DROPPING_TIES, length)
        weights_BT = self.importance.at(step).weights(input_ids_BT)
        sort_key_BT = draw_BT if weights_BT is None else -weights_BT
        order_BT = np.lexsort((draw_BT, sort_key_BT, self._token_kinds(input_ids_BT, text)))
        mask_BT = np.zeros(input_ids_BT.shape, bool)
        np.put_along_axis(mask_BT, order_BT[:, : max(1, round(self.share * length))], True, axis=1)
        return SubsetIndex.from_mask(mask_BT, self.layers, first_layer_attends_to_all=True)

    def _token_kinds(self, input_ids_BT: Array, text: Array) -> Array:
        """int64 [B, T]: _MASK, _SPECIAL, _TEXT or _EMPTY."""
        kind_BT = np.where(np.isin(input_ids_BT, self.row_builder.unmaskable()), _SPECIAL, _TEXT)
        kind_BT[input_ids_BT == self.row_builder.masking.mask_token] = _MASK
        kind_BT[np.arange(input_ids_BT.shape[1]) > 1 + (text >= 0).sum(1)[:, None]] = _EMPTY
        return kind_BT


@dataclass(frozen=True)
class TokenSubsets:
    """Which tokens the layers of an encoder compute."""

    mask_token: int

    first_masked_layer: int = 0
    """The first layer that computes mask tokens."""

    dropping: TokenDropping | None = None
    """Token dropping in middle layers; None: no tokens are dropped."""

    @staticmethod
    def from_settings(
        row_builder: EncoderRowBuilder, model: ModelConfig, text: TrainingText | None = None
    ) -> TokenSubsets:
        """The subsets of a run's settings. Held-out rows, without a training `text` to weigh tokens by, drop none."""
        masking, settings = row_builder.masking, row_builder.masking.dropping
        if text is None or settings is None:
            return TokenSubsets(masking.mask_token, masking.first_masked_layer(model))
        importance = STRATEGIES[settings.by](masking, replace(text, setting="masking.dropping.by"))
        dropping = TokenDropping(row_builder, settings.layers(model), settings.keep_share, importance)
        return TokenSubsets(masking.mask_token, masking.first_masked_layer(model), dropping)

    def select(
        self, is_target_BT: Array, input_ids_BT: Array, text: Array, step: int, rng: CounterRng
    ) -> tuple[SubsetIndex, ...]:
        """The token subsets of a batch, in the order of their layers."""
        token_subsets = () if self.dropping is None else (self.dropping.select(input_ids_BT, text, step, rng),)
        if self.first_masked_layer:
            is_mask_BT = is_target_BT & (input_ids_BT == self.mask_token)
            token_subsets = (SubsetIndex.from_mask(~is_mask_BT, range(self.first_masked_layer)), *token_subsets)
        return token_subsets
