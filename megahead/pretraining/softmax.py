"""A softmax over candidates, of which the loss and all else is asked that depends on whether they are on one rank.

N outputs, D features, U candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megahead.distributed import Group
from megahead.objectives import Candidates, EvaluationSums, Score, candidate_loss, evaluation_sums
from megahead.objectives.candidate_softmax import grouped_draws, grouped_misses


@dataclass(frozen=True)
class Softmax:
    """Outputs, and the candidates that compete for them, all on this rank."""

    outputs_ND: Tensor
    """As they are compared with rows."""

    rows_UD: Tensor
    candidates: Candidates
    score: Score

    def loss(self) -> Tensor:
        """Summed over the outputs, a scalar."""
        return candidate_loss(self.outputs_ND, self.rows_UD, self.candidates, self.score)

    def sums(self) -> EvaluationSums:
        """How well the outputs predict their targets."""
        return evaluation_sums(self.outputs_ND, self.rows_UD, self.candidates, self.score)

    def misses(self) -> Tensor:
        """bool [N]: whether another candidate is at least as probable as the target."""
        return grouped_misses(self.outputs_ND, self.rows_UD, self.candidates, self.score, Group())

    def draws(self, uniform_N: Tensor) -> Tensor:
        """int64 [N]: places among the candidates, of those that are drawn. `uniform_N`: random numbers, float64 in
        (0, 1)."""
        return grouped_draws(self.outputs_ND, self.rows_UD, self.candidates, self.score, uniform_N, Group())

    def rows_at(self, place_N: Tensor) -> Tensor:
        """[N, D]: the rows of candidates at these places."""
        return self.rows_UD.index_select(0, place_N)
