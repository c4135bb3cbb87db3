"""Masks rows of an encoder: masked language modeling, and masked diffusion."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch

from megahead.config.masking import MaskingConfig
from megahead.config.model import ModelConfig
from megahead.data.batch import Batch, EncoderRowBuilder, EncoderRows, RowCollator, SubsetIndex
from megahead.data.indexed import Array, DatasetInfo
from megahead.data.samples import CounterRng, Purpose, SampleIndices
from megahead.data.strategies import Uniform
from megahead.data.strategy import Strategy

# Targets are the tokens of the text, never their replacements. A unit is a span of tokens masked together. B rows, T
# tokens per row, M = B T tokens, U units, N targets of the batch.


@dataclass(frozen=True)
class MaskingCollator(RowCollator):
    """Masks rows. The masks depend on the sample's number alone, not on ranks or micro-batches. With an adaptive
    strategy they also depend on the run's earlier errors. The rows of a batch belong to one step."""

    row_builder: EncoderRowBuilder
    strategy: Strategy
    vocab_size: int
    seed: int

    samples_per_step: int = 1
    steps: int = 1
    """Optimizer steps of the run, for a schedule of the masking rate; all samples of a step have one rate."""

    steps_before_masking: int = 0
    """Steps before the first that masks. The rate's schedule begins at that step."""

    subsets: TokenSubsets | None = None
    """The tokens that some layers compute; None: all layers compute all."""

    @property
    def config(self) -> MaskingConfig:
        return self.row_builder.masking

    def batch(self, text: Array, sample_indices: SampleIndices, document_starts: Array | None = None) -> Batch:
        """Arguments as in `EncoderRowBuilder.build`."""
        return self.mask_rows(self.row_builder.build(text, document_starts), text, sample_indices)

    def mask_rows(
        self,
        rows: EncoderRows,
        text: Array,
        sample_indices: SampleIndices,
        adapt_strategy: Callable[[Strategy], Strategy] | None = None,
    ) -> Batch:
        """As `batch`, for `rows` of this text; `adapt_strategy` replaces the strategy of this step."""
        rng = CounterRng(self.seed, sample_indices)
        step_B = np.asarray(sample_indices) // self.samples_per_step
        step = int(step_B[0]) if len(text) else 0
        progress_B = (step_B - self.steps_before_masking) / max(self.steps - 1 - self.steps_before_masking, 1)
        rate_B = np.array([self.config.rate_at(progress) for progress in progress_B.tolist()])
        budget = rate_B, np.rint(rate_B * (text >= 0).sum(1)).astype(np.int64)
        strategy = self.strategy.at(step)
        strategy = strategy if adapt_strategy is None else adapt_strategy(strategy)
        is_target_BT = self._select_targets(strategy, rows.tokens_BT, rows.maskable_BT, budget, rng)
        input_ids_BT = self._corrupt(rows.tokens_BT, is_target_BT, rows.maskable_BT & ~is_target_BT, rng)
        subsets = self.subsets
        token_subsets = () if subsets is None else subsets.select(is_target_BT, input_ids_BT, text, step, rng)
        return replace(rows.to_batch(is_target_BT, input_ids_BT), token_subsets=token_subsets)

    def _select_targets(
        self, strategy: Strategy, tokens_BT: Array, allowed_BT: Array, budget: tuple[Array, Array], rng: CounterRng
    ) -> Array:
        """bool [B, T]: the targets; `budget`: (share of tokens to select, number of tokens to select), both [B].

        With `count: bernoulli` each unit is drawn independently, with `_probabilities`. With `count: fixed` units are
        sorted randomly, each being first with a probability proportional to its weight (as by Gumbel top-k), and
        selected as long as they fit into the row's number of targets: no unit is split.
        """
        rows, length = tokens_BT.shape
        starts_BT = strategy.starts(tokens_BT, rng) | ~allowed_BT
        starts_BT[:, 1:] |= ~allowed_BT[:, :-1]
        starts_BT[:, 0] = True
        unit_M = starts_BT.reshape(-1).cumsum() - 1  # the unit of each token
        row_U = np.flatnonzero(starts_BT) // length
        size_U = np.bincount(unit_M, allowed_BT.reshape(-1)).astype(np.int64)
        weight_U, weight_BT = np.ones(len(size_U)), strategy.weights(tokens_BT)
        if weight_BT is not None:  # a unit has the mean of its tokens
            weight_U = np.bincount(unit_M, (weight_BT * allowed_BT).reshape(-1)) / np.maximum(size_U, 1)
        draw_U = rng.uniform(Purpose.MASKING_ORDER, length)[starts_BT]
        rate_B, count_B = budget
        if self.config.count == "bernoulli":
            is_selected_U = draw_U < _probabilities(row_U, weight_U, size_U, rate_B)
        else:
            with np.errstate(divide="ignore"):
                sort_key_U = -np.log(draw_U) / weight_U
            is_selected_U = _select_units(row_U, size_U, np.lexsort((sort_key_U, row_U)), count_B)
        is_target_BT: Array = is_selected_U[unit_M].reshape(rows, length) & allowed_BT
        return is_target_BT

    def _corrupt(self, tokens_BT: Array, is_target_BT: Array, other_BT: Array, rng: CounterRng) -> Array:
        """The input ids: some targets are replaced by the mask token, some by a random token, and some of the other
        tokens (`other_BT`) by a random token, too."""
        kind_draw_BT = rng.uniform(Purpose.MASK_OR_RANDOM, tokens_BT.shape[1])
        masked_BT = is_target_BT & (kind_draw_BT < self.config.mask_share)
        random_BT = is_target_BT & ~masked_BT & (kind_draw_BT < self.config.mask_share + self.config.random_share)
        random_BT |= other_BT & (kind_draw_BT < self.config.noise_share)
        draw_BT = rng.uniform(Purpose.MASKING_REPLACEMENT, tokens_BT.shape[1])
        input_ids_BT = np.where(masked_BT, self.config.mask_token, tokens_BT)
        number_N = (draw_BT[random_BT] * len(self._ordinary_ids)).astype(np.int64)
        input_ids_BT[random_BT] = self._ordinary_ids[number_N]
        return input_ids_BT

    @cached_property
    def _ordinary_ids(self) -> Array:
        """The ids that may replace a token: all but special ones."""
        special = [id_ for id_ in self.row_builder.unmaskable() if id_ < self.vocab_size]
        return np.delete(np.arange(self.vocab_size), special)


def _probabilities(row_U: Array, weight_U: Array, size_U: Array, rate_B: Array) -> Array:
    """float64 [U]: each unit's probability, in proportion to its weight but at most 1, so that on average `rate_B`
    of a row's tokens are selected: what exceeds 1 is distributed among the row's other units."""
    tokens_B = np.bincount(row_U, size_U)
    certain_U, rest_B, total_B = np.zeros(len(size_U), bool), rate_B * tokens_B, np.bincount(row_U, weight_U * size_U)
    while True:
        probability_U = weight_U * (rest_B / np.where(total_B > 0, total_B, 1.0))[row_U]
        over_U = ~certain_U & (probability_U > 1)
        if not over_U.any():
            return np.where(certain_U, 1.0, probability_U)
        certain_U |= over_U
        rest_B = rate_B * tokens_B - np.bincount(row_U, size_U * certain_U)
        total_B = np.bincount(row_U, weight_U * size_U * ~certain_U)


def _select_units(row_U: Array, size_U: Array, order_U: Array, count_B: Array) -> Array:
    """bool [U]: the units that are selected, in `order_U`, if they fit into the rest of their row's count."""
    is_selected_U = np.zeros(len(size_U), bool)
    rest = count_B.tolist()
    for unit, row, size in zip(order_U.tolist(), row_U[order_U].tolist(), size_U[order_U].tolist(), strict=True):
        if 0 < size <= rest[row]:
            is_selected_U[unit] = True
            rest[row] -= size
    return is_selected_U


# Masked diffusion language models (MDLM: Sahoo et al. 2024, arXiv 2406.07524) mask each token of a row with the chance
# t, t uniform in (0, 1), and bound the row's negative log-likelihood by the mean of 1/t times the loss over its masked
# tokens (their simplified bound, with the log-linear schedule; other schedules have the same). Given k, the number of a
# row's n tokens that are masked, t is irrelevant and is integrated out: k is uniform on 1..n, and each masked token has
# the weight n / k, as if t were k / n. The bound is the same (Ou et al. 2024, arXiv 2406.03736; LLaDA is evaluated with
# it: Nie et al. 2025, arXiv 2502.09992), but no weight is above n, every row has a target, and a row's weights add up
# to n. This holds if all tokens are masked with equal probability, as in held-out rows; training may mask rare ones
# before others (Kosmopoulou et al. 2025, arXiv 2509.05056).


@dataclass(frozen=True)
class DiffusionCollator(RowCollator):
    """Masks a different share of each row, from one token to all. The weights of a row's targets add up to the number
    of its tokens that are not special, whatever the share."""

    loss_is_upper_bound: ClassVar = True

    row_builder: EncoderRowBuilder
    seed: int
    strategy: Strategy = field(default_factory=Uniform)
    """Its weights decide which tokens are masked, not how many."""

    def batch(self, text: Array, sample_indices: SampleIndices, document_starts: Array | None = None) -> Batch:
        """Arguments as in `EncoderRowBuilder.build`. The input of each target is the mask token; special tokens are no
        targets.

        The shares of any range of consecutive samples are evenly spaced (MDLM's low-discrepancy sampler).
        """
        rows = self.row_builder.build(text, document_starts)
        rng = CounterRng(self.seed, sample_indices)
        tokens_B = rows.maskable_BT.sum(1)
        masked_B = np.ceil(rng.low_discrepancy(Purpose.DIFFUSION_SHARES) * tokens_B).astype(np.int64)
        weight_BT = self.strategy.weights(rows.tokens_BT)
        is_target_BT = rng.choice(Purpose.DIFFUSION_POSITIONS, rows.maskable_BT, masked_B, weight_BT)
        input_ids_BT = np.where(is_target_BT, self.row_builder.masking.mask_token, rows.tokens_BT)
        weight_N = np.repeat(tokens_B / np.maximum(masked_B, 1), masked_B).astype(np.float32)
        return replace(rows.to_batch(is_target_BT, input_ids_BT), weight_N=torch.from_numpy(weight_N))

    def num_predicted_tokens(self, info: DatasetInfo) -> int:
        """All tokens that are not special."""
        unmaskable = set(self.row_builder.unmaskable())
        return sum(count for id_, count in enumerate(info.token_counts) if id_ not in unmaskable)


# Token dropping: which tokens of masked rows an encoder's middle layers compute (Hou et al. 2022, arXiv 2203.13240).
# Hou et al. take a running mean of the masked-LM loss of each id, and keep the tokens of a row whose ids have the
# highest. Special tokens, mask tokens among them, come first: only a row with more of them than `keep_share` allows
# loses some. Importance depends on the input id, so that only masks reveal which tokens are targets. Here it is the
# weight of a masking strategy, by default an id's error rate: a ratio of whole numbers (`target_error_counts`), which
# are the same on any mesh. B rows, T tokens per row.

_MASK, _SPECIAL, _TEXT, _EMPTY = range(4)  # kinds of tokens, in the order in which they are kept


@dataclass(frozen=True)
class TokenSubsets:
    """Which tokens the layers of an encoder compute, by the settings of `row_builder.masking`."""

    row_builder: EncoderRowBuilder
    model: ModelConfig

    importance: Strategy | None = None
    """By whose weights tokens are dropped in middle layers; None: none are dropped."""

    def select(
        self, is_target_BT: Array, input_ids_BT: Array, text: Array, step: int, rng: CounterRng
    ) -> tuple[SubsetIndex, ...]:
        """The token subsets of a batch, in the order of their layers. `text`, int64 [B, T - 2], is negative where a row
        is empty."""
        token_subsets, masking = list[SubsetIndex](), self.row_builder.masking
        if first_masked_layer := masking.first_masked_layer(self.model):
            is_mask_BT = is_target_BT & (input_ids_BT == masking.mask_token)
            token_subsets.append(SubsetIndex.from_mask(~is_mask_BT, range(first_masked_layer)))
        if self.importance is not None and masking.dropping is not None:
            weights_BT = self.importance.at(step).weights(input_ids_BT)
            kept_BT = self._keep(masking.dropping.keep_share, weights_BT, input_ids_BT, text, rng)
            layers = masking.dropping.layers(self.model)
            token_subsets.append(SubsetIndex.from_mask(kept_BT, layers, first_layer_attends_to_all=True))
        return tuple(token_subsets)

    def _keep(self, share: float, weights_BT: Array | None, input_ids_BT: Array, text: Array, rng: CounterRng) -> Array:
        """bool [B, T]: a share of each row's tokens: mask tokens, then other special ones, then those of the largest
        weight."""
        length = input_ids_BT.shape[1]
        kind_BT = np.where(np.isin(input_ids_BT, self.row_builder.unmaskable()), _SPECIAL, _TEXT)
        kind_BT[input_ids_BT == self.row_builder.masking.mask_token] = _MASK
        kind_BT[np.arange(length) > 1 + (text >= 0).sum(1)[:, None]] = _EMPTY
        draw_BT = rng.uniform(Purpose.DROPPING_TIES, length)
        sort_key_BT = draw_BT if weights_BT is None else -weights_BT
        order_BT = np.lexsort((draw_BT, sort_key_BT, kind_BT))
        kept_BT = np.zeros(input_ids_BT.shape, bool)
        np.put_along_axis(kept_BT, order_BT[:, : max(1, round(share * length))], True, axis=1)
        return kept_BT
