"""The module that is trained: one embedding lookup, the backbone, and a softmax over candidates.

B rows, T inputs a row, D features, N targets, U candidates, V vocabulary.
"""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor, nn

from megahead.config import ObjectiveConfig
from megahead.data import Batch
from megahead.models import Backbone
from megahead.objectives import Candidates, Scores, candidate_loss, candidate_scores, vocabulary_candidates
from megahead.pretraining.batch import MicroBatch, Scoring
from megahead.pretraining.temperature import LearnedTemperature


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
        self, backbone: Backbone, objective: ObjectiveConfig, vocab_size: int, head: OutputEmbedding | None = None
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.objective = objective
        self.vocab_size = vocab_size
        self.head = head
        self.temperature = LearnedTemperature(objective.temperature) if objective.learned_temperature else None

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
        inputs_BTD, rows = self._look_up(micro.batch.input_ids_BT, micro.candidates)
        outputs_ND = self._outputs(self.backbone.encode(inputs_BTD, micro.batch.positions_BT), micro.batch)
        parts = outputs_ND.split([group.own_N.numel() for group in micro.candidates])
        losses = [self._group_loss(*part) for part in zip(parts, rows, micro.candidates, strict=True)]
        loss = torch.stack(losses).sum()
        share = self.objective.vanilla_weight
        if share:
            vanilla = self._group_loss(outputs_ND, self._output_rows(), vocabulary_candidates(micro.batch.target_ids_N))
            loss = (1 - share) * loss + share * vanilla
        return loss * micro.loss_scale

    def _group_loss(self, outputs_ND: Tensor, rows_UD: Tensor, group: Candidates) -> Tensor:
        loss = candidate_loss(outputs_ND, rows_UD, group.own_N, group.bias_U, self._divisor(), group.own_bias_U)
        return loss + group.constant

    def _look_up(self, input_ids_BT: Tensor, groups: tuple[Candidates, ...]) -> tuple[Tensor, list[Tensor]]:
        """Rows of the inputs [B, T, D] and of each group's candidates [U, D]: one embedding call for all from there."""
        sizes = [0 if group.ids_U is None else group.ids_U.numel() for group in groups]
        ids = [group.ids_U for group in groups if group.ids_U is not None]
        looked_up = self.backbone.embed(torch.cat([input_ids_BT.flatten(), *ids]))
        inputs, *rows = looked_up.split([input_ids_BT.numel(), *sizes])
        whole = [self._output_rows() if g.ids_U is None else r for g, r in zip(groups, rows, strict=True)]
        return inputs.view(*input_ids_BT.shape, -1), whole

    def _outputs(self, hidden_BTD: Tensor, batch: Batch) -> Tensor:
        """[N, D]: those that have targets, divided by a learned temperature."""
        outputs_ND = hidden_BTD.flatten(0, 1).index_select(0, batch.target_index_N)
        return outputs_ND if self.temperature is None else self.temperature(outputs_ND)

    def _divisor(self) -> float:
        """What is left to divide scores by."""
        return self.objective.temperature if self.temperature is None else 1.0

    def _scores(self, scoring: Scoring) -> Scores:
        batch = scoring.batch
        outputs_ND = self._outputs(self.backbone(batch.input_ids_BT, batch.positions_BT), batch)
        return self._vocabulary_scores(outputs_ND, batch.target_ids_N, scoring.bias_V)

    def _vocabulary_scores(self, outputs_ND: Tensor, target_ids_N: Tensor, bias_V: Tensor | None) -> Scores:
        return candidate_scores(outputs_ND, self._output_rows(), target_ids_N, bias_V, self._divisor())

    def _output_rows(self) -> Tensor:
        """[V, D]: the output matrix without its padding."""
        return self._output_matrix().weight[: self.vocab_size]

    def _output_matrix(self) -> nn.Embedding | OutputEmbedding:
        """What outputs are scored by: the input embedding itself unless there is a head."""
        return self.backbone.embedding if self.head is None else self.head
