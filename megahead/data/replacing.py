"""Masked rows for replaced-token detection (ELECTRA: Clark et al. 2020, arXiv 2003.10555): beside what is masked, the
random numbers by which masked tokens are replaced, and which tokens are judged.

B rows, T tokens per row, N targets of the batch, P judged tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from megahead.data.batch import Batch, ReplacedTokens
from megahead.data.counter_rng import CounterRng, Purpose
from megahead.data.masking import Masker

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Replacing:
    """Masks rows by `masker`. What is drawn depends on the seed, the sample's number and the token's place alone."""

    masker: Masker
    seed: int

    def batch(self, text: Array, sample_indices: Sequence[int] | Array, document_starts: Array | None = None) -> Batch:
        """Arguments as of `Framing.rows`. A judged token may be masked or not; no special token is judged."""
        batch = self.masker.batch(text, sample_indices, document_starts)
        index_N = batch.target_index_N
        tokens_M = batch.input_ids_BT.flatten().index_copy(0, index_N, batch.target_ids_N)
        judged_M = ~np.isin(tokens_M.numpy(), self.masker.framing.unmaskable())
        draw_BT = CounterRng(self.seed, sample_indices).uniform(Purpose.REPLACED_TOKENS, batch.input_ids_BT.shape[1])
        draw_N = torch.from_numpy(draw_BT).flatten()[index_N]
        return replace(batch, replaced=ReplacedTokens(draw_N, torch.from_numpy(np.flatnonzero(judged_M))))
