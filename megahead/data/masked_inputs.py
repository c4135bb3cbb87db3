"""Mask-enhanced autoregressive prediction (MEAP): a decoder that reads some mask tokens, and predicts the text.

Zhuang et al. 2025, arXiv 2502.07490: with a share of its inputs missing a decoder must use the others better. Targets
are those of the text; nothing else of training changes, and nothing at all at inference.
B rows, T inputs per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from megahead.config import DataConfig, MaskedInputsConfig
from megahead.data.batch import Batch, causal_batch
from megahead.data.counter_rng import CounterRng, Purpose

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class MaskedInputs:
    """Makes next-token batches with masked inputs. What is masked depends on the sample's number alone."""

    config: MaskedInputsConfig
    data: DataConfig
    seed: int

    def batch(self, rows: Array, sample_indices: Sequence[int] | Array, document_starts: Array | None = None) -> Batch:
        """As `causal_batch` of `rows`, int64 [B, T+1], but for the inputs."""
        plain = causal_batch(
            rows,
            document_starts,
            end_token=self.data.end_token,
            isolate_documents=self.data.isolate_documents,
            boundary_targets=self.data.boundary_targets,
        )
        inputs_BT = plain.input_ids_BT.numpy()
        allowed_BT = inputs_BT != self.data.end_token
        count_B = np.rint(self.config.share * allowed_BT.sum(1))
        masked_BT = CounterRng(self.seed, sample_indices).choice(Purpose.MASKED_INPUTS, allowed_BT, count_B)
        return replace(plain, input_ids_BT=torch.from_numpy(np.where(masked_BT, self.config.mask_token, inputs_BT)))
