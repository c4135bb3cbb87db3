"""From rows to masked rows: what an encoder reads and must predict; masked diffusion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch

from megahead.config.masking import MaskingConfig
from megahead.data.batch import Batch, RowCollator
from megahead.data.framing import FramedRows, Framing
from megahead.data.indexed import Array, DatasetInfo
from megahead.data.samples import CounterRng, Purpose
from megahead.data.strategies import Uniform
from megahead.data.strategy import Strategy
from megahead.data.token_subsets import TokenSubsets

# Targets are the tokens of the text, never their replacements. A unit is a span of tokens masked together. B rows, T
# tokens per row, M = B T tokens, U units, N targets of the batch.


@dataclass(frozen=True)
class MaskingCollator(RowCollator):
    """Masks rows. What is masked depends on the sample's number alone, not on ranks or micro-batches; with a strategy
    that adapts also on what the run had learned long enough before. The rows of a batch are of one step."""

    framing: Framing
    strategy: Strategy
    vocab_size: int
    seed: int

    samples_per_step: int = 1
    steps: int = 1
    """Optimizer steps of the run, for a masking rate that changes; it is the same for all samples of a step."""

    steps_before_masking: int = 0
    """How many of these come before the first one that masks, with which the rate's course begins."""

    subsets: TokenSubsets | None = None
    """What some layers compute of each row; None: all of it."""

    @property
    def config(self) -> MaskingConfig:
        """What is asked for."""
        return self.framing.masking

    def batch(self, text: Array, sample_indices: Sequence[int] | Array, document_starts: Array | None = None) -> Batch:
        """Arguments as of `Framing.frame`."""
        return self.mask_rows(self.framing.frame(text, document_starts), text, sample_indices)

    def mask_rows(
        self,
        rows: FramedRows,
        text: Array,
        sample_indices: Sequence[int] | Array,
        adapted: Callable[[Strategy], Strategy] | None = None,
    ) -> Batch:
        """The same of rows that were framed before; `adapted`: by which strategy they are masked, made of the run's."""
        rng = CounterRng(self.seed, sample_indices)
        step = int(sample_indices[0]) // self.samples_per_step if len(text) else 0
        budget = self._budget(text, sample_indices)
        strategy = self.strategy.at(step) if adapted is None else adapted(self.strategy.at(step))
        chosen_BT = self._select(strategy, rows.tokens_BT, rows.maskable_BT, budget, rng)
        read_BT = self._read_as(rows.tokens_BT, chosen_BT, rows.maskable_BT & ~chosen_BT, rng)
        selections = () if self.subsets is None else self.subsets.select(chosen_BT, read_BT, text, step, rng)
        return replace(rows.batch(chosen_BT, read_BT), selections=selections)

    def _budget(self, text: Array, sample_indices: Sequence[int] | Array) -> tuple[Array, Array]:
        """(share of tokens to select, number of tokens to select), both [B]."""
        step_B = np.asarray(sample_indices) // self.samples_per_step
        progress_B = (step_B - self.steps_before_masking) / max(self.steps - 1 - self.steps_before_masking, 1)
        rate_B = np.array([self.config.rate_at(progress) for progress in progress_B.tolist()])
        return rate_B, np.rint(rate_B * (text >= 0).sum(1)).astype(np.int64)

    def _select(
        self, strategy: Strategy, tokens_BT: Array, allowed_BT: Array, budget: tuple[Array, Array], rng: CounterRng
    ) -> Array:
        """bool [B, T]: the targets.

        With `count: bernoulli` each unit is drawn for itself, with `_probabilities`. With `count: fixed` units are put
        in a random order, in which each is first with a probability proportional to its weight (exponential clocks),
        and taken as long as they fit into the row's number of targets: no unit is cut.
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
            chosen_U = draw_U < _probabilities(row_U, weight_U, size_U, rate_B)
        else:
            with np.errstate(divide="ignore"):
                race_U = -np.log(draw_U) / weight_U
            chosen_U = _fill(row_U, size_U, np.lexsort((race_U, row_U)), count_B)
        chosen_BT: Array = chosen_U[unit_M].reshape(rows, length) & allowed_BT
        return chosen_BT

    def _read_as(self, tokens_BT: Array, chosen_BT: Array, other_BT: Array, rng: CounterRng) -> Array:
        """The inputs: some of the chosen tokens replaced by the mask token, some by a random token, and some of
        the others by a random token, too."""
        treatment_BT = rng.uniform(Purpose.MASKING_TREATMENT, tokens_BT.shape[1])
        masked_BT = chosen_BT & (treatment_BT < self.config.mask_share)
        random_BT = chosen_BT & ~masked_BT & (treatment_BT < self.config.mask_share + self.config.random_share)
        random_BT |= other_BT & (treatment_BT < self.config.noise_share)
        special = sorted({id_ for id_ in self.framing.unmaskable() if id_ < self.vocab_size})
        draw_BT = rng.uniform(Purpose.MASKING_REPLACEMENT, tokens_BT.shape[1])
        read_BT = np.where(masked_BT, self.config.mask_token, tokens_BT)
        number_N = (draw_BT[random_BT] * (self.vocab_size - len(special))).astype(np.int64)
        read_BT[random_BT] = _ordinary(number_N, special)
        return read_BT


def _ordinary(number_N: Array, special: Sequence[int]) -> Array:
    """The ids that are no special ones, counted from 0 in increasing order; `special` increases. No pass over all."""
    id_N = number_N.copy()
    for id_ in special:
        id_N += id_N >= id_
    return id_N


def _probabilities(row_U: Array, weight_U: Array, size_U: Array, rate_B: Array) -> Array:
    """float64 [U]: each unit's, in proportion to its weight but at most 1, so that `rate_B` of a row's tokens are
    expected to be taken: where a weight asks for more than 1, the row's other units have the rest."""
    tokens_B = np.bincount(row_U, size_U)
    certain_U, left_B, total_B = np.zeros(len(size_U), bool), rate_B * tokens_B, np.bincount(row_U, weight_U * size_U)
    while True:
        chance_U = weight_U * (left_B / np.where(total_B > 0, total_B, 1.0))[row_U]
        over_U = ~certain_U & (chance_U > 1)
        if not over_U.any():
            return np.where(certain_U, 1.0, chance_U)
        certain_U |= over_U
        left_B = rate_B * tokens_B - np.bincount(row_U, size_U * certain_U)
        total_B = np.bincount(row_U, weight_U * size_U * ~certain_U)


def _fill(row_U: Array, size_U: Array, order_U: Array, count_B: Array) -> Array:
    """bool [U]: the units that are taken, in `order_U`, if they fit into what is left of their row's count."""
    chosen_U = np.zeros(len(size_U), bool)
    left = count_B.tolist()
    for unit, row, size in zip(order_U.tolist(), row_U[order_U].tolist(), size_U[order_U].tolist(), strict=True):
        if 0 < size <= left[row]:
            chosen_U[unit] = True
            left[row] -= size
    return chosen_U


# Masked diffusion language models (MDLM: Sahoo et al. 2024, arXiv 2406.07524) mask each token of a row with the chance
# t, t uniform in (0, 1), and bound the row's negative log-likelihood by the mean of 1/t times the loss over its masked
# tokens (their simplified bound, by the log-linear schedule; other schedules have the same). Which t it was says
# nothing more once k of the row's n tokens are masked, so it is integrated out: then k is uniform on 1..n, and each of
# the k tokens counts n / k times, as if t were k / n. It is the same bound (Ou et al. 2024, arXiv 2406.03736; so is
# LLaDA evaluated: Nie et al. 2025, arXiv 2502.09992), but no weight is above n, no row without a target, and a row's
# weights add up to n. So it is where all tokens are masked alike, as held-out rows are; training may mask rare ones
# before others (Kosmopoulou et al. 2025, arXiv 2509.05056).


@dataclass(frozen=True)
class Diffusion(RowCollator):
    """Masks of each row another share, from one token to all; rows of any share count the same."""

    upper_bound: ClassVar = True

    framing: Framing
    seed: int
    strategy: Strategy = field(default_factory=Uniform)
    """Of single tokens: by its weights some are masked before others; how many of a row stays as it is."""

    def batch(self, text: Array, sample_indices: Sequence[int] | Array, document_starts: Array | None = None) -> Batch:
        """Arguments as of `Framing.frame`. All targets are read as the mask token; special tokens are none.

        The shares of consecutive samples are spread evenly (MDLM's low-discrepancy sampler; here of any number of
        consecutive samples, wherever they begin).
        """
        rows = self.framing.frame(text, document_starts)
        rng = CounterRng(self.seed, sample_indices)
        tokens_B = rows.maskable_BT.sum(1)
        masked_B = np.ceil(rng.low_discrepancy(Purpose.DIFFUSION_SHARES) * tokens_B).astype(np.int64)
        weight_BT = self.strategy.weights(rows.tokens_BT)
        chosen_BT = rng.choice(Purpose.DIFFUSION_POSITIONS, rows.maskable_BT, masked_B, weight_BT)
        read_BT = np.where(chosen_BT, self.framing.masking.mask_token, rows.tokens_BT)
        weight_N = np.repeat(tokens_B / np.maximum(masked_B, 1), masked_B).astype(np.float32)
        return replace(rows.batch(chosen_BT, read_BT), weight_N=torch.from_numpy(weight_N))

    def num_predicted_tokens(self, info: DatasetInfo) -> int:
        """All that may be masked."""
        unmaskable = set(self.framing.unmaskable())
        return sum(count for id_, count in enumerate(info.token_counts) if id_ not in unmaskable)
