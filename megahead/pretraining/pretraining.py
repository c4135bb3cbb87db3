"""The module that is trained: one embedding lookup, the backbone, and a softmax over candidates.

B rows, T inputs a row, D features, N targets, U candidates, V vocabulary.
"""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor, nn

from megahead.models import Backbone
from megahead.objectives import Candidates, Objective, Scores, candidate_loss, candidate_scores
from megahead.pretraining.batch import MicroBatch, Scoring


class OutputEmbedding(nn.Module):
    """The matrix of an untied vanilla head, [padded vocabulary, D]: a parameter only."""

    def __init__(self, padded_vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(padded_vocab_size, hidden_size))


class Pretraining(nn.Module):
    """`backbone` learning by `objective`: a MicroBatch to its scaled loss, a Scoring to Scores.

    Both go through `forward`, because ZeRO-3 has the weights only there. Rows of the table from `vocab_size` on
    are padding: never candidates.
    """

    def __init__(
        self, backbone: Backbone, objective: Objective, vocab_size: int, head: OutputEmbedding | None = None
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.objective = objective
        self.vocab_size = vocab_size
        self.head = head

    @overload
    def __call__(self, request: MicroBatch) -> Tensor: ...
    @overload
    def __call__(self, request: Scoring) -> Scores: ...
    def __call__(self, request: MicroBatch | Scoring) -> Tensor | Scores:
        result: Tensor | Scores = super().__call__(request)
        return result

    def forward(self, request: MicroBatch | Scoring) -> Tensor | Scores:
        return self._loss(request) if isinstance(request, MicroBatch) else self._scores(request)

    def _loss(self, micro: MicroBatch) -> Tensor:
        """Scalar, connected to every trained parameter, also when the micro-batch has no targets."""
        candidates = micro.candidates
        inputs_BTD, rows_UD = self._look_up(micro.batch.input_ids_BT, candidates.ids_U)
        hidden_BTD = self.backbone.encode(inputs_BTD, micro.batch.positions_BT)
        outputs_ND = hidden_BTD.flatten(0, 1).index_select(0, micro.batch.target_index_N)
        return self._candidate_loss(outputs_ND, rows_UD, candidates) * micro.loss_scale

    def _candidate_loss(self, outputs_ND: Tensor, rows_UD: Tensor, candidates: Candidates) -> Tensor:
        return candidate_loss(outputs_ND, rows_UD, candidates.own_N, candidates.bias_U, self.objective.temperature)

    def _look_up(self, input_ids_BT: Tensor, candidate_ids_U: Tensor | None) -> tuple[Tensor, Tensor]:
        """Rows of the inputs [B, T, D] and of the candidates [U, D], in one embedding call where both come from it."""
        if candidate_ids_U is None:
            return self.backbone.embed(input_ids_BT), self._vocabulary()
        rows = self.backbone.embed(torch.cat([input_ids_BT.flatten(), candidate_ids_U]))
        inputs, candidates = rows.split([input_ids_BT.numel(), candidate_ids_U.numel()])
        return inputs.view(*input_ids_BT.shape, -1), candidates

    def _scores(self, scoring: Scoring) -> Scores:
        batch = scoring.batch
        hidden_BTD = self.backbone(batch.input_ids_BT, batch.positions_BT)
        outputs_ND = hidden_BTD.flatten(0, 1).index_select(0, batch.target_index_N)
        return self._vocabulary_scores(outputs_ND, batch.target_ids_N, scoring.bias_V)

    def _vocabulary_scores(self, outputs_ND: Tensor, target_ids_N: Tensor, bias_V: Tensor | None) -> Scores:
        return candidate_scores(outputs_ND, self._vocabulary(), target_ids_N, bias_V, self.objective.temperature)

    def _vocabulary(self) -> Tensor:
        """[V, D]: the output matrix without its padding."""
        return self._output_matrix().weight[: self.vocab_size]

    def _output_matrix(self) -> nn.Embedding | OutputEmbedding:
        """What outputs are scored by: the input embedding itself unless there is a head."""
        return self.backbone.embedding if self.head is None else self.head
