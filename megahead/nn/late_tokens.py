"""Tokens that enter later: an encoder's first layers see the others alone, in shorter rows.

B rows, T tokens per row, K slots per shorter row, D features.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megahead.nn.documents import Documents
from megahead.nn.target_positions import TargetPositions


@dataclass(frozen=True)
class LateTokens:
    """All tokens of a batch but the `early` ones: they enter behind the first `layers` layers."""

    early: TargetPositions
    """Those that are there from the first layer on."""

    layers: int

    cu_seqlens: Tensor | None = None
    """Of the shorter rows' documents, where they are known already."""

    def without(self, x_BTD: Tensor) -> Tensor:
        """[B, K, D]: the early tokens, in the first slots of each row; zeros in those that are left."""
        return self.early.spread(self.early.take(x_BTD))

    def joined(self, x_BKD: Tensor, x_BTD: Tensor) -> Tensor:
        """[B, T, D]: the early tokens as the first layers have left them, the late ones as in `x_BTD`."""
        flat = x_BTD.flatten(0, 1).index_copy(0, self.early.index_N, self.early.gather(x_BKD))
        return flat.view_as(x_BTD)

    def documents(self, documents: Documents) -> Documents:
        """Those of the shorter rows: tokens keep their positions; slots that are left are documents of their own."""
        rows, slots = self.early.rows, self.early.slots_per_row
        positions_BK = self.early.spread(self.early.take(documents.positions_BT[..., None]))[..., 0]
        if documents.one_per_row and self._fills_all:
            starts = torch.arange(0, rows * slots + 1, slots, dtype=torch.int32, device=positions_BK.device)
            return Documents(positions_BK, starts, one_per_row=True)
        number_BT = documents.starts_BT.cumsum(1)
        number_BK = self.early.spread(self.early.take(number_BT[..., None]))[..., 0]
        starts_BK = torch.ones_like(number_BK, dtype=torch.bool)
        starts_BK[:, 1:] = number_BK[:, 1:] != number_BK[:, :-1]
        return Documents(positions_BK, self.cu_seqlens, starts_BT=starts_BK)

    @cached_property
    def _fills_all(self) -> bool:
        return len(self.early.index_N) == self.early.rows * self.early.slots_per_row
