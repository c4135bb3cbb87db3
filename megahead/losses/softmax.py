"""The softmax over candidates: the reference, and the fused one, on one rank or split over tensor ranks."""

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
from megahead.losses.fused_softmax import SoftmaxStats, fused_softmax_loss, sample_candidates, softmax_stats
from megahead.losses.scores import Dot, Score

# N outputs, D features (E: after the score transforms them), U candidates; w: the candidates of one rank.


DOT = Dot()


def candidate_loss_reference(outputs_ND: Tensor, rows_UD: Tensor, candidates: Candidates, score: Score = DOT) -> Tensor:
    """`sum_i w_i [ log( exp(s_p + b'_p) + sum_{u != p} exp(s_u + b_u) ) - s_p ]`, computed literally; with
    `target_logit_has_bias` also `- b'_p`.

    w is `weight_N`, or 1 if that is None. p is the target of output i, s_u its `score` against row u (h_i.e_u / T, T
    the temperature); b is `bias_U`, b' is `as_target_bias_U`, or b if that is None. Stores N x U scores.
    """
    target_N1 = candidates.target_N[:, None]
    scores_NU = score.reference_scores(outputs_ND, rows_UD)
    target_scores_N1 = scores_NU.gather(1, target_N1)
    biased_NU = scores_NU if candidates.bias_U is None else scores_NU + candidates.bias_U
    if candidates.as_target_bias_U is not None:
        biased_NU = biased_NU.scatter(1, target_N1, target_scores_N1 + candidates.as_target_bias_U[target_N1])
    logits_N1 = candidates.target_logit(target_scores_N1, biased_NU.gather(1, target_N1))
    return candidates.apply_weights(biased_NU.logsumexp(dim=1) - logits_N1.squeeze(1)).sum()


def candidate_loss(outputs_ND: Tensor, rows_UD: Tensor, candidates: Candidates, score: Score = DOT) -> Tensor:
    """The value of `candidate_loss_reference`, a scalar, in bounded memory.

    outputs_ND, rows_UD: any float dtype; scores are float32 (float64 for float64 inputs), and the largest is
    subtracted, so that scores of +-1e4 stay finite. rows_UD: the rows of `candidates`, in their order. N = 0 gives a
    differentiable 0.

    On CUDA in half precision (or under autocast to it) gradients use probabilities rounded to it. In bf16, also on CPUs
    that support it, scores are rounded, too: an output's loss changes by at most 2^-7 times its largest score.
    """
    return Softmax(outputs_ND, rows_UD, candidates, score).loss()


class EvaluationSums(NamedTuple):
    """Sums that measure how well N outputs predict their targets. A tuple, since ZeRO-3 searches a module's outputs for
    tensors."""

    loss: float
    """Negative log-probability of the targets in nats, weighted."""

    correct: int
    """Number of targets more probable than every other candidate."""

    targets: int
    """N."""

    weight: float
    """Sum of the targets' weights; `targets` without weights."""

    auxiliary: Mapping[str, float] = {}
    """The sums of the auxiliary objective, by name."""

    @staticmethod
    def of(stats: SoftmaxStats, candidates: Candidates) -> EvaluationSums:
        """The sums for the distribution `softmax_u(s_u + b_u)`; unlike in the loss, the target's score has its bias."""
        loss_N = (stats.lse - stats.biased_target_score).double()
        loss, weight = (float(candidates.apply_weights(x_N).sum()) for x_N in (loss_N, torch.ones_like(loss_N)))
        correct = int((stats.biased_target_score > stats.best_other_score).sum())
        return EvaluationSums(loss, correct, loss_N.numel(), weight)


# The candidates may be split over a tensor group. Every rank then has all outputs and an equal share of the candidates.
# Megatron's vocabulary-parallel loss takes those whose embedding rows a rank owns; such shares would be uneven, because
# in most vocabularies frequent ids are adjacent. Each chunk of outputs costs collectives of a few numbers
# per output (two on CPUs, one on GPUs); the outputs' gradient costs one more, of N x D.


@dataclass(frozen=True)
class CandidateShard:
    """This rank's candidates: `count` of them from index `first` on, padded to `width` on every rank."""

    first: int
    count: int
    width: int
    group: Group

    @staticmethod
    def of(total: int, width: int, group: Group) -> CandidateShard:
        """This rank's share of `total` candidates: `width` consecutive ones per rank, fewer on the last ranks."""
        first = group.rank * width
        return CandidateShard(first, min(max(total - first, 0), width), width, group)

    def slice(self, bias_U: Tensor | None, pad_value: float = 0.0) -> Tensor | None:
        """[w]: this rank's slice of all candidates' biases, padded with `pad_value`."""
        if bias_U is None:
            return None
        return F.pad(bias_U[self.first : self.first + self.count], (0, self.width - self.count), value=pad_value)

    def select_local(self, rows_wD: Tensor, candidates: Candidates) -> tuple[Tensor, Candidates]:
        """This rank's rows, padded with 0, and candidates: biases [w], padded with -inf; targets as indices into these
        rows, out of range on other ranks."""
        bias_U = candidates.bias_U
        if bias_U is not None and bias_U.requires_grad:  # replicated, but each rank uses only its slice
            bias_U = copy_to_group(bias_U, self.group)
        if self.count < self.width:  # padding gets no gradient
            rows_wD = F.pad(rows_wD[: self.count], (0, 0, 0, self.width - self.count))
            bias_U = torch.zeros(self.first + self.count, device=rows_wD.device) if bias_U is None else bias_U
        return rows_wD, replace(
            candidates,
            bias_U=self.slice(bias_U, pad_value=-torch.inf),
            target_N=candidates.target_N - self.first,
            as_target_bias_U=self.slice(candidates.as_target_bias_U),
            sampling_bias_U=self.slice(candidates.sampling_bias_U),
        )


@dataclass(frozen=True)
class Softmax:
    """The softmax of outputs over candidates: all on this rank, or split over the ranks of `shard`.

    With a `shard` outputs and candidates are the same on every rank, and so are results and the gradients of outputs
    and of a learned bias; all methods are collective.
    """

    outputs_ND: Tensor
    """Final outputs: after a head's transform, if there is one."""

    rows_UD: Tensor
    """The candidates' rows; with a `shard` this rank's, [w, D]."""

    candidates: Candidates
    score: Score = DOT
    shard: CandidateShard | None = None

    def loss(self) -> Tensor:
        """`candidate_loss`: summed over the outputs, a scalar."""
        outputs_NE, rows_wE, candidates, score, group = self.local_inputs()
        if outputs_NE.shape[0] == 0:
            inputs = [outputs_NE, rows_wE] if candidates.bias_U is None else [outputs_NE, rows_wE, candidates.bias_U]
            return torch.stack([x[:0].float().sum() for x in inputs]).sum()
        return fused_softmax_loss(outputs_NE, rows_wE, candidates, score, group)

    @torch.no_grad()
    def sums(self) -> EvaluationSums:
        """The sums that measure how well the outputs predict their targets."""
        return EvaluationSums.of(softmax_stats(*self.local_inputs()), self.candidates)

    @torch.no_grad()
    def top1_errors(self) -> Tensor:
        """bool [N]: whether another candidate is at least as probable as the target."""
        stats = softmax_stats(*self.local_inputs())
        return stats.biased_target_score <= stats.best_other_score

    @torch.no_grad()
    def sample(self, uniform_N: Tensor) -> Tensor:
        """int64 [N]: the index of a candidate sampled for each output from `softmax_u(s_u + b_u)`, in which the
        output's own target has the bias `sampling_bias_U`. `uniform_N`: random numbers, float64 in (0, 1).

        For any objective, the candidates' mean sum of exponentials over groups equals the sum over the vocabulary with
        the training-free head's bias. Sampling a candidate is thus importance resampling: it returns the target about
        as often as that head would, and other tokens, averaged over many groups, nearly as often (not exactly, since
        a ratio of two means is biased). Samples from the whole vocabulary are exact."""
        candidates = replace(self.candidates, as_target_bias_U=self.candidates.sampling_bias_U)
        index_N = sample_candidates(*replace(self, candidates=candidates).local_inputs(), uniform_N)
        if self.shard is None:
            return index_N
        return self.shard.group.all_reduce_max_(torch.where(index_N < 0, -1, index_N + self.shard.first))

    def gather_rows(self, index_N: Tensor) -> Tensor:
        """[N, D]: the rows of the candidates at these indices, from whichever ranks have them."""
        if self.shard is None:
            return self.rows_UD.index_select(0, index_N)
        index_N = index_N - self.shard.first
        is_remote_N1 = ((index_N < 0) | (index_N >= self.shard.count))[:, None]
        rows_ND = self.rows_UD.index_select(0, index_N.clamp(0, self.shard.width - 1)).masked_fill(is_remote_N1, 0.0)
        return reduce_from_group(rows_ND, self.shard.group)

    def local_inputs(self) -> tuple[Tensor, Tensor, Candidates, Score, Group]:
        """The arguments of `fused_softmax_loss`: transformed outputs and local rows, local candidates, score, group."""
        rows_wD, candidates, score, group = self.rows_UD, self.candidates, self.score, Group()
        if self.shard is not None:
            (rows_wD, candidates), group = self.shard.select_local(rows_wD, candidates), self.shard.group
        return score.transform_outputs(self.outputs_ND), score.transform_rows(rows_wD), candidates, score, group


# b rows of a block, V vocabulary (the candidates).


@torch.no_grad()
def streamed_sums(
    outputs_ND: Tensor, blocks: Iterable[Tensor], vocabulary: Candidates, score: Score = DOT
) -> EvaluationSums:
    """The value of `Softmax.sums` over the whole vocabulary, whose rows are read in consecutive blocks [b, D], one at a
    time. Uses the kernel on GPUs."""
    outputs_NE = score.transform_outputs(outputs_ND)

    def block_stats() -> Iterator[SoftmaxStats]:
        first = 0
        for rows_bD in blocks:  # reads all blocks, since other ranks may take part in reading them
            shard = CandidateShard(first, len(rows_bD), len(rows_bD), Group())
            rows_bE, candidates = score.transform_rows(rows_bD), shard.select_local(rows_bD, vocabulary)[1]
            yield softmax_stats(outputs_NE, rows_bE, candidates, score, Group())
            first += len(rows_bD)

    return EvaluationSums.of(reduce(SoftmaxStats.combine, block_stats()), vocabulary)
