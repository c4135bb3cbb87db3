"""The softmax over candidates: its reference, split over tensor ranks, and as a model calls it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from megahead.distributed.group import Group, copy_to_group
from megahead.losses.candidates import Candidates
from megahead.losses.fused_softmax import RowSums, fused_softmax_loss, softmax_draws, softmax_sums
from megahead.losses.scores import Dot, Score

# N outputs, D features, U candidates.


DOT = Dot()


def candidate_loss_reference(outputs_ND: Tensor, rows_UD: Tensor, candidates: Candidates, score: Score = DOT) -> Tensor:
    """`sum_i w_i [ log( exp(s_p + b'_p) + sum_{u != p} exp(s_u + b_u) ) - s_p ]`, written out; under
    `subtracts_target_bias` also with `- b'_p`.

    w is `weight_N`, or 1 if that is None. p is the target of output i, s_u its `score` against row u (h_i.e_u / T, T
    the temperature); b is `bias_U`, b' is `target_bias_U`, or b if that is None. Holds N x U scores.
    """
    target_N1 = candidates.target_N[:, None]
    scores_NU = score.written_out(outputs_ND, rows_UD)
    target_scores_N1 = scores_NU.gather(1, target_N1)
    biased_NU = scores_NU if candidates.bias_U is None else scores_NU + candidates.bias_U
    if candidates.target_bias_U is not None:
        biased_NU = biased_NU.scatter(1, target_N1, target_scores_N1 + candidates.target_bias_U[target_N1])
    own_N1 = candidates.numerator(target_scores_N1, biased_NU.gather(1, target_N1))
    return candidates.weighed(biased_NU.logsumexp(dim=1) - own_N1.squeeze(1)).sum()


def candidate_loss(outputs_ND: Tensor, rows_UD: Tensor, candidates: Candidates, score: Score = DOT) -> Tensor:
    """The same as `candidate_loss_reference`, a scalar, in bounded memory.

    outputs_ND, rows_UD: any float type; scores are float32 (float64 for float64 inputs), and the largest is subtracted,
    so that scores of +-1e4 stay finite. rows_UD: the rows of `candidates`, in their order. N = 0 gives 0, connected to
    its inputs.

    On CUDA in half precision (or under autocast to it) gradients use probabilities that are rounded to it; so they do
    in bf16 on CPUs with units for it, where scores are rounded, too.
    """
    return grouped_candidate_loss(outputs_ND, rows_UD, candidates, score, Group())


def grouped_candidate_loss(
    outputs_ND: Tensor, rows_wD: Tensor, candidates: Candidates, score: Score, group: Group
) -> Tensor:
    """`candidate_loss` with candidates split over `group`; arguments as of `fused_softmax_loss`. Collective."""
    outputs_NE, rows_wE = score.outputs(outputs_ND), score.rows(rows_wD)
    if outputs_ND.shape[0] == 0:
        inputs = [outputs_NE, rows_wE] if candidates.bias_U is None else [outputs_NE, rows_wE, candidates.bias_U]
        return torch.stack([each[:0].float().sum() for each in inputs]).sum()
    return fused_softmax_loss(outputs_NE, rows_wE, candidates, score, group)


@torch.no_grad()
def grouped_misses(outputs_ND: Tensor, rows_wD: Tensor, candidates: Candidates, score: Score, group: Group) -> Tensor:
    """bool [N]: whether another candidate is at least as probable as the target; as `grouped_evaluation_sums`.
    Collective."""
    if outputs_ND.shape[0] == 0:
        return torch.zeros(0, dtype=torch.bool, device=outputs_ND.device)
    sums = softmax_sums(score.outputs(outputs_ND), score.rows(rows_wD), candidates, score, group)
    return sums.biased <= sums.rivals


@torch.no_grad()
def grouped_draws(
    outputs_ND: Tensor, rows_wD: Tensor, candidates: Candidates, score: Score, uniform_N: Tensor, group: Group
) -> Tensor:
    """int64 [N]: the place of a candidate drawn for each output from `softmax_u(s_u + b_u)`, where its own target
    weighs what it would on average if it were not known (`drawn_bias_U`). -1 where that is another rank's; arguments as
    of `fused_softmax_loss`, and `uniform_N`: random numbers, float64 in (0, 1). Collective.

    Candidates weigh so that, whatever the objective, their sum of exponentials is on average over groups one over the
    vocabulary, with the bias of the training-free head. They are proposals of which one is drawn by its importance: the
    original about as often as that head says, and over many groups others nearly so (the quotient of two averages is
    no average). From all ids draws are exact."""
    if outputs_ND.shape[0] == 0:
        return torch.zeros(0, dtype=torch.int64, device=outputs_ND.device)
    among = replace(candidates, target_bias_U=candidates.drawn_bias_U)
    return softmax_draws(score.outputs(outputs_ND), score.rows(rows_wD), among, score, uniform_N, group)


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
    def of(loss_N: Tensor, correct_N: Tensor, candidates: Candidates) -> EvaluationSums:
        """From each target's negative log-probability, and whether it was the most probable."""
        ones_N = torch.ones_like(loss_N, dtype=torch.float64)
        loss, weight = (float(candidates.weighed(each_N.double()).sum()) for each_N in (loss_N, ones_N))
        return EvaluationSums(loss, int(correct_N.sum()), loss_N.numel(), weight)


def evaluation_sums(outputs_ND: Tensor, rows_UD: Tensor, candidates: Candidates, score: Score = DOT) -> EvaluationSums:
    """Of the distribution `softmax_u(s_u + b_u)`; unlike in the loss, the target's score has its bias."""
    return grouped_evaluation_sums(outputs_ND, rows_UD, candidates, score, Group())


@torch.no_grad()
def grouped_evaluation_sums(
    outputs_ND: Tensor, rows_wD: Tensor, candidates: Candidates, score: Score, group: Group
) -> EvaluationSums:
    """`evaluation_sums` with candidates split over `group`; arguments as of `fused_softmax_loss`. Collective."""
    if outputs_ND.shape[0] == 0:
        return EvaluationSums(0.0, 0, 0, 0.0)
    sums = softmax_sums(score.outputs(outputs_ND), score.rows(rows_wD), candidates, score, group)
    return EvaluationSums.of(sums.lse - sums.biased, sums.biased > sums.rivals, candidates)


# The softmax over candidates that are split over a tensor group: `candidate_loss` and `evaluation_sums` in parallel.
#
# Every rank has all outputs and an equal share of the candidates: not those whose embedding rows it owns, as in
# Megatron's vocabulary-parallel loss, because frequent ids are neighbours in most vocabularies and such shares would
# be uneven. Each chunk of outputs costs collectives of a few numbers per output (two on CPUs, one on GPUs); the
# outputs' gradient costs one more, of N x D.
#
# N outputs, D features, U candidates; w: the candidates of one rank.


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


def parallel_candidate_loss(
    outputs_ND: Tensor, rows_wD: Tensor, candidates: Candidates, score: Score, shard: CandidateShard
) -> Tensor:
    """The same as `candidate_loss` with all ranks' rows together, on every rank; and its gradients.

    outputs_ND and `candidates` (all U) are the same on every rank, rows_wD are those of this rank's shard. The
    gradients of outputs_ND and of a learned bias are summed over the ranks already. Collective.
    """
    bias_U = candidates.bias_U
    if bias_U is not None and bias_U.requires_grad:  # full on every rank, which uses only its slice
        candidates = replace(candidates, bias_U=copy_to_group(bias_U, shard.group))
    return grouped_candidate_loss(outputs_ND, *_local(rows_wD, candidates, shard), score, shard.group)


def parallel_evaluation_sums(
    outputs_ND: Tensor, rows_wD: Tensor, candidates: Candidates, score: Score, shard: CandidateShard
) -> EvaluationSums:
    """The same as `evaluation_sums` with all ranks' rows together, on every rank. Collective."""
    return grouped_evaluation_sums(outputs_ND, *_local(rows_wD, candidates, shard), score, shard.group)


def parallel_misses(
    outputs_ND: Tensor, rows_wD: Tensor, candidates: Candidates, score: Score, shard: CandidateShard
) -> Tensor:
    """bool [N]: whether another candidate is at least as probable as the target, on every rank. Collective."""
    return grouped_misses(outputs_ND, *_local(rows_wD, candidates, shard), score, shard.group)


def parallel_draws(
    outputs_ND: Tensor, rows_wD: Tensor, candidates: Candidates, score: Score, uniform_N: Tensor, shard: CandidateShard
) -> Tensor:
    """int64 [N]: places among all candidates, drawn as by `grouped_draws` on one rank; on every rank. Collective."""
    place_N = grouped_draws(outputs_ND, *_local(rows_wD, candidates, shard), score, uniform_N, shard.group)
    return shard.group.all_reduce_max_(torch.where(place_N < 0, -1, place_N + shard.first))


def _local(rows_wD: Tensor, candidates: Candidates, shard: CandidateShard) -> tuple[Tensor, Candidates]:
    """This rank's rows and biases, [w], padded with 0 and -inf, and targets as indices into these rows; indices outside
    of them mean that another rank has the target."""
    bias_U = candidates.bias_U
    if shard.count < shard.width:  # what lies beyond the candidates gets no gradient at all
        rows_wD = F.pad(rows_wD[: shard.count], (0, 0, 0, shard.width - shard.count))
        bias_U = torch.zeros(shard.first + shard.count, device=rows_wD.device) if bias_U is None else bias_U
    return rows_wD, replace(
        candidates,
        bias_U=shard.slice(bias_U, elsewhere=-torch.inf),
        target_N=candidates.target_N - shard.first,
        target_bias_U=shard.slice(candidates.target_bias_U),
        drawn_bias_U=shard.slice(candidates.drawn_bias_U),
    )


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


# b rows of a block, V vocabulary (the candidates, U elsewhere).


@torch.no_grad()
def streamed_sums(
    outputs_ND: Tensor, blocks: Iterable[Tensor], vocabulary: Candidates, score: Score = DOT
) -> EvaluationSums:
    """The same as `evaluation_sums` over the whole vocabulary, whose rows arrive as consecutive blocks [b, D]; only one
    block is in memory at a time. On GPUs by the kernel, as there."""
    outputs_ND, first = score.outputs(outputs_ND), 0
    found: RowSums | None = None
    for rows_bD in blocks:  # all of them, as they may come from other ranks
        if len(outputs_ND):
            among = _within(vocabulary, first, len(rows_bD))
            sums = softmax_sums(outputs_ND, score.rows(rows_bD), among, score, Group())
            found = sums if found is None else found.beside(sums)
        first += len(rows_bD)
    if found is None:
        return EvaluationSums(0.0, 0, 0, 0.0)
    return EvaluationSums.of(found.lse - found.biased, found.biased > found.rivals, vocabulary)


def _within(vocabulary: Candidates, first: int, count: int) -> Candidates:
    """So many candidates from the one numbered `first` on; targets elsewhere are outside of them."""
    bias_b = None if vocabulary.bias_U is None else vocabulary.bias_U[first : first + count]
    return Candidates(None, bias_b, vocabulary.target_N - first)
