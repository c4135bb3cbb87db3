"""From an encoder's rows to next tokens: what it reads and predicts while it learns as a decoder does.

A row is cut and framed as where tokens are masked, so that a sample is the same text whichever of the two is learned.
B rows, T tokens per row, N targets of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megahead.data.batch import Batch
from megahead.data.framing import Framing

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class NextTokens:
    """Reads rows as they are; the target of each token is the next one of the text, that of [CLS] the first."""

    framing: Framing

    boundary_targets: bool
    """Whether a document's first token is a target, of the last token of the document before it."""

    def batch(self, text: Array, sample_indices: Sequence[int] | Array, document_starts: Array | None = None) -> Batch:
        """Arguments as of `Framing.rows`; t targets in a full row."""
        rows = self.framing.rows(text, document_starts)
        known_BT = np.zeros(rows.tokens_BT.shape, bool)
        known_BT[:, :-2] = text >= 0
        if not self.boundary_targets:
            known_BT &= ~rows.ends_BT
        index_N = np.flatnonzero(known_BT)
        return Batch(
            torch.from_numpy(rows.tokens_BT),
            None if rows.positions_BT is None else torch.from_numpy(rows.positions_BT),
            torch.from_numpy(index_N),
            torch.from_numpy(rows.tokens_BT.reshape(-1)[index_N + 1]),
        )
