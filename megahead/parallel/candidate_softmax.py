"""The softmax over candidates that are split over a tensor group: `candidate_loss` and `candidate_scores`, shared out.

Every rank holds all outputs and an even share of the candidates, not those whose rows it owns: frequent ids lie
together in the vocabulary. A chunk of outputs costs two small all-reduces, of n maxima and of n x 2 sums; the gradient
of the outputs one of N x D.

N outputs, D features, U candidates; n: the outputs of one chunk, w: the candidates of one rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from megahead.distributed import Group, copy_to_group
from megahead.objectives import Scores
from megahead.objectives.candidate_softmax import CHUNK_BYTES, LOWEST, promoted


@dataclass(frozen=True)
class CandidateShard:
    """This rank's candidates: `count` of them from number `first` on, in a table of `width` rows on every rank."""

    first: int
    count: int
    width: int

    @staticmethod
    def of(total: int, width: int, group: Group) -> CandidateShard:
        """The share of `group`'s rank in `total` candidates, `width` for each rank until there are no more."""
        first = group.rank * width
        return CandidateShard(first, min(max(total - first, 0), width), width)

    def bias(self, bias_U: Tensor | None) -> Tensor | None:
        """[w]: this share of all candidates' biases, zeros where the table has no candidate."""
        if bias_U is None:
            return None
        return F.pad(bias_U[self.first : self.first + self.count], (0, self.width - self.count))


def parallel_candidate_loss(
    outputs_ND: Tensor,
    rows_wD: Tensor,
    positive_N: Tensor,
    bias_U: Tensor | None,
    temperature: float,
    share: CandidateShard,
    group: Group,
    positive_bias_U: Tensor | None = None,
) -> Tensor:
    """What `candidate_loss` gives for all ranks' rows together, on every rank; and its gradients.

    outputs_ND, positive_N (places among all U candidates) and bias_U are the same on every rank, rows_wD is its share.
    The gradients of outputs_ND and of bias_U, if it asks for one, come summed over the ranks. Collective.
    """
    if outputs_ND.shape[0] == 0:
        return 0.0 * (outputs_ND.float().sum() + rows_wD.float().sum())
    if bias_U is not None and bias_U.requires_grad:  # whole on every rank, which sees its own share of it alone
        bias_U = copy_to_group(bias_U, group)
    bias_w, positive_bias_w = share.bias(bias_U), share.bias(positive_bias_U)
    loss: Tensor = _ParallelCandidateLoss.apply(
        outputs_ND, rows_wD, positive_N, bias_w, positive_bias_w, temperature, share, group
    )
    return loss


@torch.no_grad()
def parallel_candidate_scores(
    outputs_ND: Tensor,
    rows_wD: Tensor,
    positive_N: Tensor,
    bias_U: Tensor | None,
    temperature: float,
    share: CandidateShard,
    group: Group,
) -> Scores:
    """What `candidate_scores` gives for all ranks' rows together, on every rank. Collective.

    A target whose score ties with the largest counts as correct.
    """
    loss, correct = 0.0, 0
    outputs, rows = promoted(outputs_ND, rows_wD)
    for part in _softmax_chunks(outputs, rows, positive_N, share.bias(bias_U), None, temperature, share, group):
        loss += float((part.top_n + part.total_n.log() - part.positive_biased_n).double().sum())
        correct += int((part.positive_biased_n >= part.top_n).sum())
    return Scores(loss, correct, positive_N.numel())


class _Chunk(NamedTuple):
    """Some outputs, scored against all candidates of all ranks."""

    rows: slice
    exponentials_nw: Tensor
    """exp(score - top) of this rank's candidates; the buffer may be overwritten."""
    top_n: Tensor
    """Largest biased score."""
    total_n: Tensor
    """Sum of all ranks' exponentials."""
    positive_n: Tensor
    """Score of the own candidate without its bias."""
    positive_biased_n: Tensor
    positive_index_n1: Tensor
    """Place of the own candidate in this rank's table, where this rank holds it."""
    mine_n1: Tensor
    """1 where it does, else 0."""


def _softmax_chunks(
    outputs_ND: Tensor,
    rows_wD: Tensor,
    positive_N: Tensor,
    bias_w: Tensor | None,
    positive_bias_w: Tensor | None,
    temperature: float,
    share: CandidateShard,
    group: Group,
) -> Iterator[_Chunk]:
    """Chunks of the same outputs on every rank, at most CHUNK_BYTES of scores each."""
    total = outputs_ND.shape[0]
    bias = outputs_ND.new_zeros(share.width) if bias_w is None else bias_w.to(outputs_ND.dtype)
    step = max(1, min(total, CHUNK_BYTES // (share.width * outputs_ND.element_size())))
    buffer = outputs_ND.new_empty(step, share.width)
    for start in range(0, total, step):
        rows = slice(start, min(start + step, total))
        scores_nw = buffer[: rows.stop - start]
        torch.addmm(bias, outputs_ND[rows], rows_wD.T, alpha=1 / temperature, out=scores_nw)
        scores_nw[:, share.count :] = -torch.inf
        local_n1 = positive_N[rows, None] - share.first
        mine_n1 = ((local_n1 >= 0) & (local_n1 < share.count)).to(scores_nw.dtype)
        index_n1 = local_n1.clamp(0, share.width - 1)
        held_n1 = scores_nw.gather(1, index_n1)
        if positive_bias_w is None:
            positive_n1 = held_n1 - bias[index_n1]
        else:
            positive_n1 = (outputs_ND[rows] * rows_wD[index_n1[:, 0]]).sum(1, keepdim=True) / temperature
            positive_biased_n1 = positive_n1 + positive_bias_w.to(positive_n1.dtype)[index_n1]
            held_n1 = positive_biased_n1.where(mine_n1 > 0, held_n1)
            scores_nw.scatter_(1, index_n1, held_n1)
        top_n1 = group.all_reduce_max_(scores_nw.amax(dim=1, keepdim=True))
        scores_nw.sub_(top_n1).clamp_min_(LOWEST).exp_()
        scores_nw[:, share.count :] = 0.0
        of_own = [score_n1.where(mine_n1 > 0, 0.0) for score_n1 in (positive_n1, held_n1)]
        sums_n3 = group.all_reduce_(torch.cat([scores_nw.sum(1, keepdim=True), *of_own], 1))
        total_n, positive_n, positive_biased_n = sums_n3.unbind(1)
        yield _Chunk(rows, scores_nw, top_n1[:, 0], total_n, positive_n, positive_biased_n, index_n1, mine_n1)


class _ParallelCandidateLoss(torch.autograd.Function):
    """Both gradients are computed while a chunk's scores are at hand, as in one process."""

    @staticmethod
    def forward(
        ctx: Any,
        outputs_ND: Tensor,
        rows_wD: Tensor,
        positive_N: Tensor,
        bias_w: Tensor | None,
        positive_bias_w: Tensor | None,
        temperature: float,
        share: CandidateShard,
        group: Group,
    ) -> Tensor:
        with torch.autocast(outputs_ND.device.type, enabled=False):
            outputs, rows = promoted(outputs_ND, rows_wD)
            grad_outputs, grad_rows = torch.empty_like(outputs), torch.zeros_like(rows)
            grad_bias = rows.new_zeros(len(rows)) if ctx.needs_input_grad[3] else None
            loss = outputs.new_zeros(())
            for part in _softmax_chunks(outputs, rows, positive_N, bias_w, positive_bias_w, temperature, share, group):
                loss += (part.top_n + part.total_n.log() - part.positive_n).sum()
                grad_nw = part.exponentials_nw.div_(part.total_n[:, None])
                if grad_bias is not None:
                    grad_bias += grad_nw.sum(0)
                grad_nw.scatter_add_(1, part.positive_index_n1, -part.mine_n1)
                torch.mm(grad_nw, rows, out=grad_outputs[part.rows])
                grad_rows.addmm_(grad_nw.T, outputs[part.rows])
        grad_outputs = group.all_reduce_(grad_outputs).div_(temperature)
        ctx.save_for_backward(grad_outputs, grad_rows.div_(temperature), grad_bias)
        ctx.dtypes = outputs_ND.dtype, rows_wD.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad_outputs, grad_rows, grad_bias = ctx.saved_tensors
        outputs_dtype, rows_dtype = ctx.dtypes
        grads = (grad_outputs * grad_loss).to(outputs_dtype), (grad_rows * grad_loss).to(rows_dtype)
        return *grads, None, None if grad_bias is None else grad_bias * grad_loss, None, None, None, None
