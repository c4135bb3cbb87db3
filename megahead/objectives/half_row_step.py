"""The row step with products in bf16, for CPUs with units for them.

torch's bf16 products on CPUs are rounded to bf16, so scores are, as those of a bf16 head in Megatron or under autocast.
Their softmax, the loss and the sums of gradients are in float32; residuals are rounded once more for the products that
read them, as on GPUs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megahead.distributed import Group
from megahead.objectives.candidates import Candidates
from megahead.objectives.row_step import Residuals, TorchRowStep
from megahead.objectives.scores import Score


class HalfRowStep(TorchRowStep):
    """A `RowStep` on bf16 inputs, for losses under scores that are products."""

    def __init__(self, outputs_ND: Tensor, rows_wD: Tensor, candidates: Candidates, score: Score, group: Group) -> None:
        super().__init__(outputs_ND, rows_wD, candidates, score, group)
        self._half = rows_wD.new_empty(self._buffer.shape)
        """A chunk's scores and, once these are copied, its residuals."""

    def residuals(self, outputs_nD: Tensor, positive_n: Tensor) -> Residuals:
        found = super().residuals(outputs_nD, positive_n)
        return found._replace(matrix_nw=self._half[: len(outputs_nD)].copy_(found.matrix_nw))

    def product_(self, result: Tensor, left: Tensor, right: Tensor) -> None:
        result.copy_(torch.mm(left, right))

    def add_product_(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        total.add_(torch.mm(left.to(self._half.dtype), right.to(self._half.dtype)))

    def _biased_(self, scores_nw: Tensor, outputs_nD: Tensor) -> None:
        rounded_nw = torch.mm(outputs_nD, self._rows_wD.T, out=self._half[: len(outputs_nD)])
        scores_nw.copy_(rounded_nw).mul_(self._score.scale).add_(self._bias_w)
