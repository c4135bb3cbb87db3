"""The dot product: the paper's score, and that of every usual head."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megahead.objectives.scores.score import Score


@dataclass(frozen=True)
class Dot(Score):
    """`h . e / T`."""

    def written_out(self, outputs_ND: Tensor, rows_UD: Tensor) -> Tensor:
        return outputs_ND @ rows_UD.T * self.scale
