"""The softmax over candidates that are split over a tensor group: `candidate_loss` and `evaluation_sums` in parallel.

Every rank holds all outputs and an equal share of the candidates. It is not the share whose embedding rows it owns, as
in Megatron's vocabulary-parallel loss: frequent ids have neighbouring numbers, so those shares would be uneven. A chunk
of outputs costs two small all-reduces, of n maxima and of n x 3 sums; the outputs' gradient costs one more, of N x D.

N outputs, D features, U candidates; n: the outputs of one chunk, w: the candidates of one rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megahead.config.loss_chunks import CHUNK_BYTES
from megahead.distributed import copy_to_group
from megahead.objectives import Candidates, CandidateShard, EvaluationSums
from megahead.objectives.chunked import MIN_SHIFTED_SCORE, promoted


def parallel_candidate_loss(
    outputs_ND: Tensor, rows_wD: Tensor, candidates: Candidates, temperature: float, shard: CandidateShard
) -> Tensor:
    """What `candidate_loss` gives for all ranks' rows together, on every rank; and its gradients.

    outputs_ND and `candidates` (all U) are the same on every rank, rows_wD are those of this rank's shard. The
    gradients of outputs_ND and of a learned bias come summed over the ranks. Collective.
    """
    if outputs_ND.shape[0] == 0:
        return 0.0 * (outputs_ND.float().sum() + rows_wD.float().sum()) + candidates.constant
    bias_U = candidates.bias_U
    if bias_U is not None and bias_U.requires_grad:  # full on every rank, which uses only its slice
        candidates = replace(candidates, bias_U=copy_to_group(bias_U, shard.group))
    local = _local(candidates, shard)
    loss: Tensor = _ParallelCandidateLoss.apply(outputs_ND, rows_wD, local.bias_U, local, temperature, shard)
    return loss + candidates.constant


@torch.no_grad()
def parallel_evaluation_sums(
    outputs_ND: Tensor, rows_wD: Tensor, candidates: Candidates, temperature: float, shard: CandidateShard
) -> EvaluationSums:
    """What `evaluation_sums` gives for all ranks' rows together, on every rank. Collective.

    A target whose score ties with the largest counts as correct.
    """
    loss, correct = 0.0, 0
    for part in _softmax_chunks(*promoted(outputs_ND, rows_wD), _local(candidates, shard), temperature, shard):
        loss += float((part.top_n + part.total_n.log() - part.positive_biased_n).double().sum())
        correct += int((part.positive_biased_n >= part.top_n).sum())
    return EvaluationSums(loss, correct, candidates.positive_N.numel())


def _local(candidates: Candidates, shard: CandidateShard) -> Candidates:
    """The same with this rank's biases alone, [w]; positives keep their places among all U."""
    biases = shard.slice(candidates.bias_U), shard.slice(candidates.positive_bias_U)
    return replace(candidates, bias_U=biases[0], positive_bias_U=biases[1])


class _Chunk(NamedTuple):
    """Some outputs, scored against all candidates of all ranks."""

    outputs: slice
    exponentials_nw: Tensor
    """exp(score - top) of this rank's candidates; the buffer may be overwritten."""
    top_n: Tensor
    """Largest biased score."""
    total_n: Tensor
    """Sum of all ranks' exponentials."""
    positive_n: Tensor
    """Score of the positive without its bias."""
    positive_biased_n: Tensor
    """Score of the positive with its bias."""
    positive_index_n1: Tensor
    """Place of the positive among this rank's candidates, if it is one of them."""
    mine_n1: Tensor
    """1 if it does, else 0."""


def _softmax_chunks(
    outputs_ND: Tensor, rows_wD: Tensor, local: Candidates, temperature: float, shard: CandidateShard
) -> Iterator[_Chunk]:
    """Chunks of the same outputs on every rank, at most CHUNK_BYTES of scores each. Two all-reduces a chunk."""
    total, group = outputs_ND.shape[0], shard.group
    bias = outputs_ND.new_zeros(shard.width) if local.bias_U is None else local.bias_U.to(outputs_ND.dtype)
    positive_bias_w = local.positive_bias_U
    step = max(1, min(total, CHUNK_BYTES // (shard.width * outputs_ND.element_size())))
    buffer = outputs_ND.new_empty(step, shard.width)
    for start in range(0, total, step):
        chunk = slice(start, min(start + step, total))
        scores_nw = buffer[: chunk.stop - start]
        torch.addmm(bias, outputs_ND[chunk], rows_wD.T, alpha=1 / temperature, out=scores_nw)
        scores_nw[:, shard.count :] = -torch.inf
        local_n1 = local.positive_N[chunk, None] - shard.first
        mine_n1 = ((local_n1 >= 0) & (local_n1 < shard.count)).to(scores_nw.dtype)
        index_n1 = local_n1.clamp(0, shard.width - 1)
        held_n1 = scores_nw.gather(1, index_n1)
        if positive_bias_w is None:
            positive_n1 = held_n1 - bias[index_n1]
        else:
            positive_n1 = (outputs_ND[chunk] * rows_wD[index_n1[:, 0]]).sum(1, keepdim=True) / temperature
            positive_biased_n1 = positive_n1 + positive_bias_w.to(positive_n1.dtype)[index_n1]
            held_n1 = positive_biased_n1.where(mine_n1 > 0, held_n1)
            scores_nw.scatter_(1, index_n1, held_n1)
        top_n1 = group.all_reduce_max_(scores_nw.amax(dim=1, keepdim=True))
        scores_nw.sub_(top_n1).clamp_min_(MIN_SHIFTED_SCORE).exp_()
        scores_nw[:, shard.count :] = 0.0
        of_positive = [score_n1.where(mine_n1 > 0, 0.0) for score_n1 in (positive_n1, held_n1)]
        sums_n3 = group.all_reduce_(torch.cat([scores_nw.sum(1, keepdim=True), *of_positive], 1))
        total_n, positive_n, positive_biased_n = sums_n3.unbind(1)
        yield _Chunk(chunk, scores_nw, top_n1[:, 0], total_n, positive_n, positive_biased_n, index_n1, mine_n1)


class _ParallelCandidateLoss(torch.autograd.Function):
    """Computes the gradients while the scores of a chunk are at hand, as on one rank."""

    @staticmethod
    def forward(
        ctx: Any,
        outputs_ND: Tensor,
        rows_wD: Tensor,
        bias_w: Tensor | None,
        local: Candidates,
        temperature: float,
        shard: CandidateShard,
    ) -> Tensor:
        with torch.autocast(outputs_ND.device.type, enabled=False):
            outputs, rows = promoted(outputs_ND, rows_wD)
            grad_outputs, grad_rows = torch.empty_like(outputs), torch.zeros_like(rows)
            grad_bias = rows.new_zeros(len(rows)) if ctx.needs_input_grad[2] else None
            loss = outputs.new_zeros(())
            for part in _softmax_chunks(outputs, rows, local, temperature, shard):
                loss += (part.top_n + part.total_n.log() - part.positive_n).sum()
                grad_nw = part.exponentials_nw.div_(part.total_n[:, None])
                if grad_bias is not None:
                    grad_bias += grad_nw.sum(0)
                grad_nw.scatter_add_(1, part.positive_index_n1, -part.mine_n1)
                torch.mm(grad_nw, rows, out=grad_outputs[part.outputs])
                grad_rows.addmm_(grad_nw.T, outputs[part.outputs])
        grad_outputs = shard.group.all_reduce_(grad_outputs).div_(temperature)
        ctx.save_for_backward(grad_outputs, grad_rows.div_(temperature), grad_bias)
        ctx.dtypes = outputs_ND.dtype, rows_wD.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad_outputs, grad_rows, grad_bias = ctx.saved_tensors
        outputs_dtype, rows_dtype = ctx.dtypes
        grads = (grad_outputs * grad_loss).to(outputs_dtype), (grad_rows * grad_loss).to(rows_dtype)
        return *grads, None if grad_bias is None else grad_bias * grad_loss, None, None, None
