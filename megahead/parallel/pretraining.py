"""Pretraining with its weights split over a tensor group: the same losses and scores, shared out.

B rows, T inputs a row, D features, N targets, U candidates, V vocabulary; w: the candidates of one rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from megahead.config import ObjectiveConfig
from megahead.distributed import Group
from megahead.models import Backbone
from megahead.objectives import Candidates, Scores
from megahead.parallel.candidate_softmax import CandidateShard, parallel_candidate_loss, parallel_candidate_scores
from megahead.pretraining import MaskHead, OutputEmbedding, Pretraining


class SplitOutputEmbedding(OutputEmbedding):
    """This rank's rows of an untied head, as of the embedding table."""

    shard_dims: ClassVar[Mapping[str, int]] = {"weight": 0}


class TensorParallelPretraining(Pretraining):
    """A `Pretraining` whose backbone was parallelised over `group`; every rank of it gets the same requests.

    A headless softmax splits its candidates evenly over the ranks; one over the vocabulary leaves each row with its
    owner, which is even too. An encoder's transform and bias are whole on every rank.
    """

    def __init__(
        self,
        backbone: Backbone,
        objective: ObjectiveConfig,
        vocab_size: int,
        head: SplitOutputEmbedding | None,
        mask_head: MaskHead | None,
        group: Group,
    ) -> None:
        super().__init__(backbone, objective, vocab_size, head, mask_head)
        self.group = group

    def _look_up(self, input_ids_BT: Tensor, groups: tuple[Candidates, ...]) -> tuple[Tensor, list[Tensor]]:
        """Rows of the inputs [B, T, D], and of this rank's share of each group's candidates [w, D]."""
        tables = [self._even_table(group.ids_U) for group in groups if group.ids_U is not None]
        if not tables:
            return self.backbone.embed(input_ids_BT), [self._output_rows() for _ in groups]
        shared_ids = torch.cat(tables, dim=1).flatten()  # rank by rank, each rank's share of every group
        inputs_BTD, shares_WD = self.backbone.embedding(input_ids_BT, shared_ids)
        return inputs_BTD, list(shares_WD.split([table.shape[1] for table in tables]))

    def _even_table(self, ids_U: Tensor) -> Tensor:
        """[ranks, w]: the ids shared out evenly, -1 where there are no more."""
        width = self._even(ids_U.numel())
        return F.pad(ids_U, (0, width * self.group.size - ids_U.numel()), value=-1).view(self.group.size, width)

    def _group_loss(self, outputs_ND: Tensor, rows_wD: Tensor, group: Candidates) -> Tensor:
        share = self._share(None if group.ids_U is None else group.ids_U.numel())
        loss = parallel_candidate_loss(
            outputs_ND,
            rows_wD,
            group.positive_N,
            group.bias_U,
            self._divisor(),
            share,
            self.group,
            group.positive_bias_U,
        )
        return loss + group.constant

    def _vocabulary_scores(self, outputs_ND: Tensor, target_ids_N: Tensor, bias_V: Tensor | None) -> Scores:
        return parallel_candidate_scores(
            outputs_ND, self._output_rows(), target_ids_N, bias_V, self._divisor(), self._share(None), self.group
        )

    def _output_rows(self) -> Tensor:
        """This rank's rows of the output matrix; padding has no share, see `_share`."""
        return self._output_matrix().weight

    def _share(self, candidates: int | None) -> CandidateShard:
        """This rank's share of that many candidates; of the vocabulary's rows for None."""
        if candidates is None:
            return CandidateShard.of(self.vocab_size, self._output_matrix().weight.shape[0], self.group)
        return CandidateShard.of(candidates, self._even(candidates), self.group)

    def _even(self, candidates: int) -> int:
        return max(1, -(-candidates // self.group.size))
