"""Pretraining with its weights split over a tensor group: the same losses and scores, shared out.

B rows, T inputs a row, D features, N targets, U candidates, V vocabulary; w: the candidates of one rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor
from torch.nn import functional as F

from megahead.distributed import Group
from megahead.models import Backbone
from megahead.objectives import Candidates, Objective, Scores
from megahead.parallel.softmax import Share, split_candidate_loss, split_candidate_scores
from megahead.pretraining import OutputEmbedding, Pretraining


class SplitOutputEmbedding(OutputEmbedding):
    """This rank's rows of an untied head, as of the embedding table."""

    shard_dims: ClassVar[Mapping[str, int]] = {"weight": 0}


class TensorParallelPretraining(Pretraining):
    """A `Pretraining` whose backbone was parallelised over `group`; every rank of it gets the same requests.

    A headless softmax splits its candidates evenly over the ranks; one over the vocabulary leaves each row with its
    owner, which is even too.
    """

    def __init__(
        self,
        backbone: Backbone,
        objective: Objective,
        vocab_size: int,
        head: SplitOutputEmbedding | None,
        group: Group,
    ) -> None:
        super().__init__(backbone, objective, vocab_size, head)
        self.group = group

    def _look_up(self, input_ids_BT: Tensor, candidate_ids_U: Tensor | None) -> tuple[Tensor, Tensor]:
        """Rows of the inputs [B, T, D], and of this rank's share of the candidates [w, D]."""
        if candidate_ids_U is None:
            return self.backbone.embed(input_ids_BT), self._output_matrix().weight
        total = candidate_ids_U.numel()
        padding = self._even(total) * self.group.size - total
        inputs_BTD, rows_wD = self.backbone.embedding(input_ids_BT, F.pad(candidate_ids_U, (0, padding), value=-1))
        return inputs_BTD, rows_wD

    def _candidate_loss(self, outputs_ND: Tensor, rows: Tensor, candidates: Candidates) -> Tensor:
        share = self._share(None if candidates.ids_U is None else candidates.ids_U.numel())
        return split_candidate_loss(
            outputs_ND, rows, candidates.own_N, candidates.bias_U, self.objective.temperature, share, self.group
        )

    def _vocabulary_scores(self, outputs_ND: Tensor, target_ids_N: Tensor, bias_V: Tensor | None) -> Scores:
        rows, temperature = self._output_matrix().weight, self.objective.temperature
        return split_candidate_scores(
            outputs_ND, rows, target_ids_N, bias_V, temperature, self._share(None), self.group
        )

    def _share(self, candidates: int | None) -> Share:
        """This rank's share of that many candidates; of the vocabulary's rows for None."""
        if candidates is None:
            return Share.of(self.vocab_size, self._output_matrix().weight.shape[0], self.group)
        return Share.of(candidates, self._even(candidates), self.group)

    def _even(self, candidates: int) -> int:
        return max(1, -(-candidates // self.group.size))
