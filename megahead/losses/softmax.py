"""The softmax over candidates: its reference, and as a model calls it, on one rank or split over tensor ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from megahead.distributed.group import Group, copy_to_group, reduce_from_group
from megahead.losses.candidates import Candidates
from megahead.losses.fused_softmax import RowSums, fused_softmax_loss, softmax_draws, softmax_sums
from megahead.losses.scores import Dot, Score

# N outputs, D features, U candidates; w: the candidates of one rank.


DOT = Dot()


def candidate_loss_reference(outputs_ND: Tensor, rows_UD: Tensor, candidates: Candidates, score: Score = DOT) -> Tensor:
    """`sum_i w_i [ log( exp(s_p + b'_p) + sum_{u != p} exp(s_u + b_u) ) - s_p ]`, written out; under
    `subtracts_target_bias` also with `- b'_p`.

    w is `weight_N`, or 1 if that is None. p is the target of output i, s_u its `score` against row u (h_i.e_u / T, T
    the temperature); b is `bias_U`, b' is `target_bias_U`, or b if that is None. Holds N x U scores.
    """
    target_N1 = candidates.target_N[:, None]
    scores_NU = score.reference(outputs_ND, rows_UD)
    target_scores_N1 = scores_NU.gather(1, target_N1)
    biased_NU = scores_NU if candidates.bias_U is None else scores_NU + candidates.bias_U
    if candidates.target_bias_U is not None:
        biased_NU = biased_NU.scatter(1, target_N1, target_scores_N1 + candidates.target_bias_U[target_N1])
    own_N1 = candidates.numerator(target_scores_N1, biased_NU.gather(1, target_N1))
    return candidates.weighted(biased_NU.logsumexp(dim=1) - own_N1.squeeze(1)).sum()


def candidate_loss(outputs_ND: Tensor, rows_UD: Tensor, candidates: Candidates, score: Score = DOT) -> Tensor:
    """The same as `candidate_loss_reference`, a scalar, in bounded memory.

    outputs_ND, rows_UD: any float type; scores are float32 (float64 for float64 inputs), and the largest is subtracted,
    so that scores of +-1e4 stay finite. rows_UD: the rows of `candidates`, in their order. N = 0 gives 0, connected to
    its inputs.

    On CUDA in half precision (or under autocast to it) gradients use probabilities that are rounded to it; so they do
    in bf16 on CPUs with units for it, where scores are rounded, too.
    """
    return Softmax(outputs_ND, rows_UD, candidates, score).loss()


class EvaluationSums(NamedTuple):
    """How well N outputs predict their targets, summed up. A tuple, since ZeRO-3 looks for tensors in outputs."""

    loss: float
    """Negative log-probability in nats, of each target as often as it counts."""

    correct: int
    """Targets that were more probable than every other candidate."""

    targets: int
    """N."""

    weight: float
    """How often all of them count together: `targets`, unless they have weights of their own."""

    auxiliary: Mapping[str, float] = {}
    """What an auxiliary objective has summed, by name."""

    @staticmethod
    def of(sums: RowSums, candidates: Candidates) -> EvaluationSums:
        """Of the distribution `softmax_u(s_u + b_u)`; unlike in the loss, the target's score has its bias."""
        loss_N = (sums.lse - sums.biased).double()
        loss, weight = (float(candidates.weighted(each_N).sum()) for each_N in (loss_N, torch.ones_like(loss_N)))
        return EvaluationSums(loss, int((sums.biased > sums.rivals).sum()), loss_N.numel(), weight)


# The candidates may be split over a tensor group. Every rank then has all outputs and an equal share of the candidates:
# not those whose embedding rows it owns, as in Megatron's vocabulary-parallel loss, because frequent ids are neighbours
# in most vocabularies and such shares would be uneven. Each chunk of outputs costs collectives of a few numbers per
# output (two on CPUs, one on GPUs); the outputs' gradient costs one more, of N x D.


@dataclass(frozen=True)
class CandidateShard:
    """This rank's candidates: `count` of them from number `first` on, padded to `width` on every rank."""

    first: int
    count: int
    width: int
    group: Group

    @staticmethod
    def of(total: int, width: int, group: Group) -> CandidateShard:
        """This rank's share of `total` candidates: consecutive ones, `width` per rank until there are no more."""
        first = group.rank * width
        return CandidateShard(first, min(max(total - first, 0), width), width, group)

    def slice(self, bias_U: Tensor | None, elsewhere: float = 0.0) -> Tensor | None:
        """[w]: this rank's slice of all candidates' biases, padded with `elsewhere`."""
        if bias_U is None:
            return None
        return F.pad(bias_U[self.first : self.first + self.count], (0, self.width - self.count), value=elsewhere)

    def local(self, rows_wD: Tensor, candidates: Candidates) -> tuple[Tensor, Candidates]:
        """This rank's rows and biases, [w], padded with 0 and -inf, and targets as indices into these rows; indices
        outside of them mean that another rank has the target."""
        bias_U = candidates.bias_U
        if bias_U is not None and bias_U.requires_grad:  # full on every rank, which uses only its slice
            bias_U = copy_to_group(bias_U, self.group)
        if self.count < self.width:  # what lies beyond the candidates gets no gradient at all
            rows_wD = F.pad(rows_wD[: self.count], (0, 0, 0, self.width - self.count))
            bias_U = torch.zeros(self.first + self.count, device=rows_wD.device) if bias_U is None else bias_U
        return rows_wD, replace(
            candidates,
            bias_U=self.slice(bias_U, elsewhere=-torch.inf),
            target_N=candidates.target_N - self.first,
            target_bias_U=self.slice(candidates.target_bias_U),
            drawn_bias_U=self.slice(candidates.drawn_bias_U),
        )


@dataclass(frozen=True)
class Softmax:
    """Outputs, and the candidates that compete for them: all on this rank, or split over the ranks of `shard`.

    Then outputs and candidates are the same on every rank, and so are results and the gradients of outputs and of a
    learned bias; all methods are collective.
    """

    outputs_ND: Tensor
    """As they are compared with rows."""

    rows_UD: Tensor
    """[w, D] where candidates are split: those of this rank."""

    candidates: Candidates
    score: Score = DOT
    shard: CandidateShard | None = None

    def loss(self) -> Tensor:
        """`candidate_loss`: summed over the outputs, a scalar."""
        outputs_NE, rows_wE, candidates, score, group = self._own()
        if outputs_NE.shape[0] == 0:
            inputs = [outputs_NE, rows_wE] if candidates.bias_U is None else [outputs_NE, rows_wE, candidates.bias_U]
            return torch.stack([each[:0].float().sum() for each in inputs]).sum()
        return fused_softmax_loss(outputs_NE, rows_wE, candidates, score, group)

    @torch.no_grad()
    def sums(self) -> EvaluationSums:
        """How well the outputs predict their targets."""
        return EvaluationSums.of(softmax_sums(*self._own()), self.candidates)

    @torch.no_grad()
    def top1_errors(self) -> Tensor:
        """bool [N]: whether another candidate is at least as probable as the target."""
        sums = softmax_sums(*self._own())
        return sums.biased <= sums.rivals

    @torch.no_grad()
    def draws(self, uniform_N: Tensor) -> Tensor:
        """int64 [N]: the place, among all candidates, of one drawn for each output from `softmax_u(s_u + b_u)`, where
        its own target weighs what it would on average if it were not known (`drawn_bias_U`). `uniform_N`: random
        numbers, float64 in (0, 1).

        Candidates are weighted so that, whatever the objective, their sum of exponentials is on average over groups one
        over the vocabulary, with the bias of the training-free head. They are proposals of which one is drawn by its
        importance: the original about as often as that head says, and over many groups others nearly so (the quotient
        of two averages is no average). From all ids draws are exact."""
        among = replace(self.candidates, target_bias_U=self.candidates.drawn_bias_U)
        place_N = softmax_draws(*replace(self, candidates=among)._own(), uniform_N)
        if self.shard is None:
            return place_N
        return self.shard.group.all_reduce_max_(torch.where(place_N < 0, -1, place_N + self.shard.first))

    def rows_at(self, place_N: Tensor) -> Tensor:
        """[N, D]: the rows of the candidates at these places; each comes from the rank that has it."""
        if self.shard is None:
            return self.rows_UD.index_select(0, place_N)
        place_N = place_N - self.shard.first
        elsewhere_N1 = ((place_N < 0) | (place_N >= self.shard.count))[:, None]
        own_ND = self.rows_UD.index_select(0, place_N.clamp(0, self.shard.width - 1)).masked_fill(elsewhere_N1, 0.0)
        return reduce_from_group(own_ND, self.shard.group)

    def _own(self) -> tuple[Tensor, Tensor, Candidates, Score, Group]:
        """What products read of the outputs and of this rank's rows, this rank's candidates, and the ranks."""
        rows_wD, candidates, group = self.rows_UD, self.candidates, Group()
        if self.shard is not None:
            (rows_wD, candidates), group = self.shard.local(rows_wD, candidates), self.shard.group
        return self.score.outputs(self.outputs_ND), self.score.rows(rows_wD), candidates, self.score, group


# b rows of a block, V vocabulary (the candidates, U elsewhere).


@torch.no_grad()
def streamed_sums(
    outputs_ND: Tensor, blocks: Iterable[Tensor], vocabulary: Candidates, score: Score = DOT
) -> EvaluationSums:
    """The same as `Softmax.sums` over the whole vocabulary, whose rows arrive as consecutive blocks [b, D]; only one
    block is in memory at a time. On GPUs by the kernel, as there."""
    outputs_NE = score.outputs(outputs_ND)

    def of_blocks() -> Iterator[RowSums]:
        first = 0
        for rows_bD in blocks:  # all of them, as they may come from other ranks
            part = CandidateShard(first, len(rows_bD), len(rows_bD), Group())
            rows_bE, among = score.rows(rows_bD), part.local(rows_bD, vocabulary)[1]
            yield softmax_sums(outputs_NE, rows_bE, among, score, Group())
            first += len(rows_bD)

    return EvaluationSums.of(reduce(RowSums.combine, of_blocks()), vocabulary)
