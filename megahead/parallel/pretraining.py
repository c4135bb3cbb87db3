"""Pretraining with its weights split over a tensor group: the same losses and evaluation sums (of losses, right
predictions and targets) as on one rank.

Headless (contrastive weight tying): the softmax runs over the embeddings of a candidate group's targets. A candidate
group is a number of consecutive samples whose targets are candidates for each other, not a group of ranks.

B rows, T inputs a row, D features, N targets, U candidates, V vocabulary; w: one rank's candidates of a candidate
group, W: of all candidate groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from megahead.config import ObjectiveConfig
from megahead.distributed import Group, reduce_from_group
from megahead.models import Backbone
from megahead.objectives import Candidates, CandidateShard, EvaluationSums
from megahead.parallel.candidate_softmax import (
    parallel_candidate_loss,
    parallel_draws,
    parallel_evaluation_sums,
    parallel_misses,
)
from megahead.pretraining import Detection, MaskHead, OutputBias, OutputEmbedding, Pretraining, Softmax


class SplitOutputEmbedding(OutputEmbedding):
    """This rank's rows of an untied head, split like those of the embedding table."""

    shard_dims: ClassVar[Mapping[str, int]] = {"weight": 0}


@dataclass(frozen=True)
class SplitSoftmax(Softmax):
    """The same softmax with the candidates split over the ranks of a group, on each of them; all is collective. Its
    rows are those of this rank's candidates, [w, D]; places are among the candidates of all ranks."""

    shard: CandidateShard

    def loss(self) -> Tensor:
        return parallel_candidate_loss(self.outputs_ND, self.rows_UD, self.candidates, self.score, self.shard)

    def sums(self) -> EvaluationSums:
        return parallel_evaluation_sums(self.outputs_ND, self.rows_UD, self.candidates, self.score, self.shard)

    def misses(self) -> Tensor:
        return parallel_misses(self.outputs_ND, self.rows_UD, self.candidates, self.score, self.shard)

    def draws(self, uniform_N: Tensor) -> Tensor:
        return parallel_draws(self.outputs_ND, self.rows_UD, self.candidates, self.score, uniform_N, self.shard)

    def rows_at(self, place_N: Tensor) -> Tensor:
        """On every rank: each comes from the rank that has it."""
        place_N = place_N - self.shard.first
        elsewhere_N1 = ((place_N < 0) | (place_N >= self.shard.count))[:, None]
        own_ND = self.rows_UD.index_select(0, place_N.clamp(0, self.shard.width - 1)).masked_fill(elsewhere_N1, 0.0)
        return reduce_from_group(own_ND, self.shard.group)


class TensorParallelPretraining(Pretraining):
    """A `Pretraining` whose backbone is split over `group`; every rank of it is called with the same inputs.

    A headless softmax splits its candidates evenly over the ranks; a softmax over the vocabulary leaves each row on the
    rank that owns it, which also balances the work. An encoder's transform (`mask_head`), and biases, are full on every
    rank.
    """

    def __init__(
        self,
        backbone: Backbone,
        objective: ObjectiveConfig,
        vocab_size: int,
        head: SplitOutputEmbedding | None,
        mask_head: MaskHead | None,
        output_bias: OutputBias | None,
        detection: Detection | None,
        group: Group,
    ) -> None:
        super().__init__(backbone, objective, vocab_size, head, mask_head, output_bias, detection)
        self.group = group

    def _look_up(self, input_ids_BT: Tensor, per_group: tuple[Candidates, ...]) -> tuple[Tensor, list[Tensor]]:
        """Embeddings of the inputs [B, T, D], and the rows of this rank's share of each candidate group [w, D].

        The split embedding looks up both at once: it returns the rows of all inputs on every rank, and scatters those
        of `scattered_ids`, an even share to each rank."""
        by_rank = [self._split_evenly(candidates.ids_U) for candidates in per_group if candidates.ids_U is not None]
        if not by_rank:
            return self.backbone.embed(input_ids_BT), [self._output_rows() for _ in per_group]
        scattered_ids = torch.cat(by_rank, dim=1).flatten()  # rank by rank, each rank's share of every candidate group
        inputs_BTD, shares_WD = self.backbone.embedding(input_ids_BT, scattered_ids)
        return inputs_BTD, list(shares_WD.split([ids.shape[1] for ids in by_rank]))

    def _split_evenly(self, ids_U: Tensor) -> Tensor:
        """[ranks, w]: the ids split evenly, padded with -1."""
        width = self._even(ids_U.numel())
        return F.pad(ids_U, (0, width * self.group.size - ids_U.numel()), value=-1).view(self.group.size, width)

    def _softmax(self, hidden_ND: Tensor, rows_wD: Tensor, candidates: Candidates) -> Softmax:
        return SplitSoftmax(hidden_ND, rows_wD, candidates, self._score(), self._shard(candidates))

    def _output_rows(self) -> Tensor:
        """This rank's rows of the output matrix, padding rows included, which `_shard` leaves out."""
        return self._output_matrix().weight

    def _shard(self, candidates: Candidates) -> CandidateShard:
        """This rank's share of the candidates; if they are the whole vocabulary, the rows that this rank owns."""
        if candidates.ids_U is None:
            return CandidateShard.of(self.vocab_size, self._output_rows().shape[0], self.group)
        count = candidates.ids_U.numel()
        return CandidateShard.of(count, self._even(count), self.group)

    def _even(self, candidates: int) -> int:
        """How many candidates each rank gets, padding included."""
        return max(1, -(-candidates // self.group.size))
