"""The cosine: directions alone are compared, so that no row gets ahead by its length."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from megahead.objectives.scores.score import Score


@dataclass(frozen=True)
class Cosine(Score):
    """`cos(h, e) / T`, as contrastive learning has it (SimCLR: Chen et al. 2020, arXiv 2002.05709)."""

    def outputs(self, outputs_ND: Tensor) -> Tensor:
        return super().outputs(F.normalize(outputs_ND, dim=-1))

    def rows(self, rows_UD: Tensor) -> Tensor:
        return F.normalize(rows_UD, dim=-1)

    def written_out(self, outputs_ND: Tensor, rows_UD: Tensor) -> Tensor:
        return F.cosine_similarity(outputs_ND[:, None], rows_UD, dim=-1) * self.scale
