"""The softmax over candidates that are split over a tensor group: `candidate_loss` and `evaluation_sums` in parallel.

Every rank has all outputs and an equal share of the candidates: not those whose embedding rows it owns, as in
Megatron's vocabulary-parallel loss, because frequent ids are neighbours in most vocabularies and such shares would be
uneven. Each chunk of outputs costs collectives of a few numbers per output (two on CPUs, one on GPUs); the outputs'
gradient costs one more, of N x D.

N outputs, D features, U candidates; w: the candidates of one rank.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from megahead.distributed import copy_to_group
from megahead.objectives import Candidates, CandidateShard, EvaluationSums, Score
from megahead.objectives.candidate_softmax import (
    grouped_candidate_loss,
    grouped_draws,
    grouped_evaluation_sums,
    grouped_misses,
)


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
    if shard.count < shard.width:  # what lies beyond the candidates gets no gradient at all
        rows_wD = F.pad(rows_wD[: shard.count], (0, 0, 0, shard.width - shard.count))
    return grouped_candidate_loss(outputs_ND, rows_wD, _local(candidates, shard), score, shard.group)


def parallel_evaluation_sums(
    outputs_ND: Tensor, rows_wD: Tensor, candidates: Candidates, score: Score, shard: CandidateShard
) -> EvaluationSums:
    """The same as `evaluation_sums` with all ranks' rows together, on every rank. Collective."""
    return grouped_evaluation_sums(outputs_ND, rows_wD, _local(candidates, shard), score, shard.group)


def parallel_misses(
    outputs_ND: Tensor, rows_wD: Tensor, candidates: Candidates, score: Score, shard: CandidateShard
) -> Tensor:
    """bool [N]: whether another candidate is at least as probable as the target, on every rank. Collective."""
    if shard.count < shard.width:
        rows_wD = F.pad(rows_wD[: shard.count], (0, 0, 0, shard.width - shard.count))
    return grouped_misses(outputs_ND, rows_wD, _local(candidates, shard), score, shard.group)


def parallel_draws(
    outputs_ND: Tensor, rows_wD: Tensor, candidates: Candidates, score: Score, uniform_N: Tensor, shard: CandidateShard
) -> Tensor:
    """int64 [N]: places among all candidates, drawn as by `grouped_draws` on one rank; on every rank. Collective."""
    if shard.count < shard.width:
        rows_wD = F.pad(rows_wD[: shard.count], (0, 0, 0, shard.width - shard.count))
    place_N = grouped_draws(outputs_ND, rows_wD, _local(candidates, shard), score, uniform_N, shard.group)
    return shard.group.all_reduce_max_(torch.where(place_N < 0, -1, place_N + shard.first))


def _local(candidates: Candidates, shard: CandidateShard) -> Candidates:
    """The same with only this rank's biases, [w], padded with -inf, and positives (targets) as indices into this rank's
    rows; indices outside of them mean that another rank has the positive."""
    bias_U = candidates.bias_U
    if bias_U is None and shard.count < shard.width:
        bias_U = torch.zeros(shard.first + shard.count, device=candidates.positive_N.device)
    return replace(
        candidates,
        bias_U=shard.slice(bias_U, elsewhere=-torch.inf),
        positive_N=candidates.positive_N - shard.first,
        positive_bias_U=shard.slice(candidates.positive_bias_U),
        drawn_bias_U=shard.slice(candidates.drawn_bias_U),
    )
