"""Tokens that some layers of an encoder compute alone, in shorter rows: the others pass these layers by.

B rows, T tokens per row, K slots per shorter row, D features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megahead.nn.documents import Documents
from megahead.nn.target_positions import TargetPositions


@dataclass(frozen=True)
class ShorterRows:
    """The `kept` tokens of a batch, which are alone in `layers`; the others are behind these what they were before."""

    kept: TargetPositions

    layers: range
    """Consecutive ones, at least one, and not the last of the encoder."""

    first_reads_all: bool
    """Whether the kept tokens still see the others in the first of the layers."""

    cu_seqlens: Tensor | None = None
    """Of the shorter rows' documents, where they are known already."""

    @property
    def are_full(self) -> bool:
        """Whether all rows have as many kept tokens."""
        return len(self.kept.index_N) == self.kept.rows * self.kept.slots_per_row

    def of(self, x_BTD: Tensor) -> Tensor:
        """[B, K, D]: the kept tokens, in the first slots of each row; zeros in those that are left."""
        return self.kept.spread(self.kept.take(x_BTD))

    def joined(self, x_BKD: Tensor, x_BTD: Tensor) -> Tensor:
        """[B, T, D]: the kept tokens as these layers have left them, the others as in `x_BTD`."""
        flat = x_BTD.flatten(0, 1).index_copy(0, self.kept.index_N, self.kept.gather(x_BKD))
        return flat.view_as(x_BTD)

    def documents(self, documents: Documents) -> Documents:
        """Those of the shorter rows: tokens keep their positions; slots that are left are documents of their own."""
        rows, slots = self.kept.rows, self.kept.slots_per_row
        positions_BK = self.of(documents.positions_BT[..., None])[..., 0]
        if documents.one_per_row and self.are_full:
            starts = torch.arange(0, rows * slots + 1, slots, dtype=torch.int32, device=positions_BK.device)
            return Documents(positions_BK, starts, one_per_row=True)
        number_BK = self.of(documents.starts_BT.cumsum(1)[..., None])[..., 0]
        starts_BK = torch.ones_like(number_BK, dtype=torch.bool)
        starts_BK[:, 1:] = number_BK[:, 1:] != number_BK[:, :-1]
        return Documents(positions_BK, self.cu_seqlens, starts_BT=starts_BK)
