"""The rows that one rank owns, with their moments: kept as they were when last updated, read as they would be now.

n rows of this rank, D features; O: some of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from megahead.optim import RowRule, Rows

WEIGHT = "weight"
_BLOCK = 1 << 14
"""Rows that are brought up to date at once where all of them are read."""


class OwnedRows:
    """fp32 on the device; `touched`, the steps at which rows were last updated, on the CPU.

    Rows are never brought up to date in place only to look at them: roundings would move, and a run that was saved
    would not go on bitwise.
    """

    def __init__(self, count: int, features: int, rule: RowRule, device: torch.device) -> None:
        self.rule = rule
        widths = {WEIGHT: features} | {n: features if kind == "each" else 1 for n, kind in rule.moments.items()}
        self.rows = {name: torch.zeros(count, width, device=device) for name, width in widths.items()}
        self.touched_n = torch.zeros(count, dtype=torch.int32)

    @property
    def steps(self) -> int:
        """Steps applied so far."""
        return self.rule.history.steps

    def count_stale(self, owned_O: Tensor) -> int:
        """How many of these have not been updated by the last step (int64 on the CPU)."""
        return int((self.touched_n[owned_O] < self.steps).sum())

    def take(self, owned_O: Tensor) -> dict[str, Tensor]:
        """Copies of these rows, brought up to date."""
        there_O = owned_O.to(self.rows[WEIGHT].device)
        taken = {name: values.index_select(0, there_O) for name, values in self.rows.items()}
        self.rule.catch_up_(taken, self.touched_n[owned_O])
        return taken

    def put(self, owned_O: Tensor, rows: Rows) -> None:
        """These rows were updated by the last step."""
        there_O = owned_O.to(self.rows[WEIGHT].device)
        for name, values in self.rows.items():
            values.index_copy_(0, there_O, rows[name])
        self.touched_n.index_fill_(0, owned_O, self.steps)

    def blocks(self) -> Iterator[Tensor]:
        """All weights as they would be now, some [b, D] at a time."""
        for places in torch.arange(len(self.touched_n)).split(_BLOCK):
            yield self.take(places)[WEIGHT]

    def forget_steps(self) -> None:
        """Weights are as new: everything else is as before the first step."""
        for values in (*(values for name, values in self.rows.items() if name != WEIGHT), self.touched_n):
            values.zero_()
        self.rule.resume(np.empty(0))
