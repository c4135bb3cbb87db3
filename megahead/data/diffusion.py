"""Masked diffusion: of each row another share is masked, from one token to all, and rows of any share count the same.

Masked diffusion language models (MDLM: Sahoo et al. 2024, arXiv 2406.07524) mask each token of a row with the chance t,
t uniform in (0, 1), and bound the row's negative log-likelihood by the mean of 1/t times the loss over its masked
tokens (their simplified bound, by the log-linear schedule; other schedules have the same). Which t it was says nothing
more once k of the row's n tokens are masked, so it is integrated out: then k is uniform on 1..n, and each of the k
tokens counts n / k times, as if t were k / n. It is the same bound (Ou et al. 2024, arXiv 2406.03736; so is LLaDA
evaluated: Nie et al. 2025, arXiv 2502.09992), but no weight is above n, no row without a target, and a row's weights
add up to n. So it is where all tokens are masked alike, as held-out rows are; training may mask rare ones before others
(Kosmopoulou et al. 2025, arXiv 2509.05056).

B rows, T tokens per row, N targets of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from megahead.data.batch import Batch
from megahead.data.counter_rng import CounterRng, Purpose
from megahead.data.framing import Framing
from megahead.data.strategies import Strategy, Uniform

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Diffusion:
    """Masks rows by shares of their own. What is masked depends on the sample's number alone."""

    framing: Framing
    seed: int
    strategy: Strategy = field(default_factory=Uniform)
    """Of single tokens: by its weights some are masked before others; how many of a row stays as it is."""

    def batch(self, text: Array, sample_indices: Sequence[int] | Array, document_starts: Array | None = None) -> Batch:
        """Arguments as of `Framing.rows`. All targets are read as the mask token; special tokens are none.

        The shares of consecutive samples are spread evenly (MDLM's low-discrepancy sampler; here of any number of
        consecutive samples, wherever they begin).
        """
        rows = self.framing.rows(text, document_starts)
        noise = CounterRng(self.seed, sample_indices)
        tokens_B = rows.maskable_BT.sum(1)
        masked_B = np.ceil(noise.spread(Purpose.DIFFUSION_SHARES) * tokens_B).astype(np.int64)
        weight_BT = self.strategy.weights(rows.tokens_BT)
        chosen_BT = noise.choice(Purpose.DIFFUSION_PLACES, rows.maskable_BT, masked_B, weight_BT)
        read_BT = np.where(chosen_BT, self.framing.masking.mask_token, rows.tokens_BT)
        weight_N = np.repeat(tokens_B / np.maximum(masked_B, 1), masked_B).astype(np.float32)
        return replace(rows.batch(chosen_BT, read_BT), weight_N=torch.from_numpy(weight_N))

    def maskable(self, token_counts: Sequence[int]) -> int:
        """How many of a text's tokens may be masked; `token_counts`: of each id."""
        unmaskable = set(self.framing.unmaskable())
        return sum(count for id_, count in enumerate(token_counts) if id_ not in unmaskable)
