"""Which of a batch's positions have a target; also as a table with the same number of slots for each row.

B rows, T tokens per row, N targets, M slots per row, S = B M slots, D features.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class TargetPositions:
    """N of the B * T positions: those whose outputs are wanted."""

    index_N: Tensor
    """int64, increasing: positions in the B rows back to back."""

    rows: int
    """B."""

    row_length: int
    """T."""

    max_per_row: int | None = None
    """Most targets that one row has, where they are few (an encoder's masked tokens); None: about every position."""

    @property
    def are_few(self) -> bool:
        """Whether so few positions have a target that computing them alone pays."""
        return self.max_per_row is not None

    @property
    def slots_per_row(self) -> int:
        """M: the largest number of targets in a row, or T."""
        return self.row_length if self.max_per_row is None else self.max_per_row

    def take(self, x_BTD: Tensor) -> Tensor:
        """[N, ...]: `x_BTD` at the targets; [1, T, ...] is the same in all rows."""
        index_N = self.index_N if len(x_BTD) == self.rows else self.index_N % self.row_length
        return x_BTD.flatten(0, 1).index_select(0, index_N)

    def spread(self, x_ND: Tensor) -> Tensor:
        """[B, M, ...]: each row's targets in its first slots, zeros in the others."""
        slots = self.rows * self.slots_per_row
        if len(self.index_N) != slots:
            x_ND = x_ND.new_zeros(slots, *x_ND.shape[1:]).index_copy(0, self._slot_N, x_ND)
        spread_BMD: Tensor = x_ND.unflatten(0, (self.rows, self.slots_per_row))
        return spread_BMD

    def gather(self, x_BMD: Tensor) -> Tensor:
        """[N, ...]: the inverse of `spread`."""
        x_SD = x_BMD.flatten(0, 1)
        return x_SD if len(self.index_N) == len(x_SD) else x_SD.index_select(0, self._slot_N)

    def mask(self, mask_BTT: Tensor) -> Tensor:
        """[B, M, T]: the lines of `mask_BTT` that belong to the targets; unused slots see everything."""
        lines_BMT = self.spread(self.take(mask_BTT).to(torch.uint8)).bool()
        return lines_BMT | ~lines_BMT.any(-1, keepdim=True)

    @cached_property
    def _slot_N(self) -> Tensor:
        row_N = self.index_N // self.row_length
        starts_B = torch.searchsorted(row_N, torch.arange(self.rows, device=row_N.device))
        place_N = torch.arange(len(row_N), device=row_N.device) - starts_B[row_N]
        return row_N * self.slots_per_row + place_N
