"""The softmax of a chunk of outputs as one Triton kernel, between products of cuBLAS: one program for each output.

A program reads its row of scores once for their logsumexp, and again, from a cache, to write residuals in the type
that the next products read. Candidates split over ranks: the kernel runs twice, and one small all-gather between.

Shapes: n outputs of a chunk, w candidates of this rank, D features. With `TRITON_INTERPRET=1` in the environment before
this module is imported, the kernel runs on the CPU, for tests.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from megahead.config.objective import GPU_CHUNKS
from megahead.distributed.group import Group
from megahead.losses.candidates import Candidates
from megahead.losses.fused_softmax import ChunkSoftmax, Residuals, RowSums
from megahead.losses.scores import Score

BLOCK = 1024
"""Scores that a program reads at once, 8 for each thread of 4 warps: two loads of 16 bytes."""

WARPS = 4

ALIGNMENT = 16
"""Rows of the buffers and biases are padded to a multiple of so many elements, so that loads and products move 16 bytes
at once however many candidates there are: a vocabulary may have any size."""


class TritonChunkSoftmax(ChunkSoftmax):
    """A `ChunkSoftmax` for GPUs, for scores that are products, on half-precision or float32 inputs of one type; scores
    and sums are float32."""

    def __init__(self, outputs_ND: Tensor, rows_wD: Tensor, candidates: Candidates, score: Score, group: Group) -> None:
        super().__init__(outputs_ND, rows_wD, candidates, score, group)
        biases = candidates.bias_U, candidates.target_bias_U
        bias_w, target_bias_w = (None if bias is None else bias.detach().float() for bias in biases)
        self._biases = None if bias_w is None else padded(bias_w), target_bias_w
        self.chunk = GPU_CHUNKS.outputs(outputs_ND.shape[0], len(rows_wD), torch.float32.itemsize)
        shape = self.chunk, triton.cdiv(len(rows_wD), ALIGNMENT) * ALIGNMENT
        self._scores = rows_wD.new_empty(shape, dtype=torch.float32)
        self._residuals, self.gradient_dtype = rows_wD.new_empty(shape), rows_wD.dtype

    def sums(self, outputs_nD: Tensor, target_n: Tensor) -> RowSums:
        return self._over_ranks(self._sum_up(self._scored(outputs_nD), target_n, residuals=False))

    def residuals(self, outputs_nD: Tensor, target_n: Tensor) -> Residuals:
        scores_nw = self._scored(outputs_nD)
        alone = self._group.size == 1
        found = self._over_ranks(self._sum_up(scores_nw, target_n, residuals=alone))
        if not alone:
            self._sum_up(scores_nw, target_n, residuals=True, lse_n=found.lse)
        loss_n = found.lse - self._numerator(found.target, found.biased)
        return Residuals(loss_n, self._residuals[: len(scores_nw), : scores_nw.shape[1]], None)

    def add_product_(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        if left.is_cuda:
            torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
        else:  # torch has no such product for CPUs
            total.addmm_(left.to(total.dtype), right.to(total.dtype))

    def _scored(self, outputs_nD: Tensor) -> Tensor:
        """[n, w]: scores without temperature and biases."""
        scores_nw, columns_Dw = self._scores[: len(outputs_nD), : len(self._rows_wD)], self._rows_wD.T
        if outputs_nD.is_cuda:
            return torch.mm(outputs_nD, columns_Dw, out_dtype=torch.float32, out=scores_nw)
        return torch.mm(outputs_nD.float(), columns_Dw.float(), out=scores_nw)

    def _sum_up(self, scores_nw: Tensor, target_n: Tensor, residuals: bool, lse_n: Tensor | None = None) -> Tensor:
        """Runs the kernel: [4, n], this rank's `RowSums`, unless lse_n is given; and fills the buffer of residuals."""
        (count, width), sums_4n = scores_nw.shape, scores_nw.new_empty(4, len(scores_nw))
        buffers = (scores_nw, self._residuals if residuals else None, sums_4n, lse_n)
        numbers = (self._score.scale, count, width, scores_nw.stride(0))
        _softmax_kernel[(count,)](*buffers, target_n, *self._biases, *numbers, BLOCK=BLOCK, num_warps=WARPS)
        return sums_4n

    def _over_ranks(self, sums_4n: Tensor) -> RowSums:
        """All ranks' `RowSums` from each one's [4, n]."""
        if self._group.size == 1:
            return RowSums(*sums_4n.unbind())
        lse, target, biased, rivals = self._group.all_gather(sums_4n).unbind(dim=1)
        return RowSums(lse.logsumexp(dim=0), target.sum(dim=0), biased.sum(dim=0), rivals.amax(dim=0))


def padded(bias_w: Tensor) -> Tensor:
    """As long as the rows of the buffers; what is added counts nowhere."""
    missing = -len(bias_w) % ALIGNMENT
    return F.pad(bias_w, (0, missing)) if missing else bias_w


@triton.jit  # type: ignore[untyped-decorator]
def _softmax_kernel(  # type: ignore[no-untyped-def]
    scores, residuals, sums, lse, target, bias, target_bias, scale, count, width, stride, BLOCK: tl.constexpr
):
    """One output: its sums, unless its lse is given; its residuals, if there is room for them."""
    n = tl.program_id(0)
    scores += n.to(tl.int64) * stride
    place = tl.load(target + n)
    held = (place >= 0) & (place < width)
    place = tl.where(held, place, -1)  # another rank's may lie in the last block, beyond the candidates
    score = tl.load(scores + place, mask=held, other=0.0) * scale
    own = score
    if target_bias is not None:
        own += tl.load(target_bias + place, mask=held, other=0.0)
    elif bias is not None:
        own += tl.load(bias + place, mask=held, other=0.0)
    if lse is None:
        total, rivals = _sums(scores, bias, place, own, scale, width, stride, BLOCK)
        tl.store(sums + n, total)
        tl.store(sums + count + n, score)
        tl.store(sums + 2 * count + n, own)
        tl.store(sums + 3 * count + n, rivals)
    else:
        total = tl.load(lse + n)
    if residuals is not None:
        residuals += n.to(tl.int64) * stride
        for first in range(0, width, BLOCK):
            u = first + tl.arange(0, BLOCK)
            probabilities = tl.exp(_biased(scores, bias, place, own, u, scale, width, stride) - total)
            values = probabilities - tl.where(u == place, 1.0, 0.0)
            tl.store(residuals + u, values.to(residuals.dtype.element_ty), mask=u < stride)


@triton.jit  # type: ignore[untyped-decorator]
def _sums(scores, bias, place, own, scale, width, stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """(logsumexp of the row, largest score but the target's), with one exponential for each score.

    Each lane has a running maximum and a sum below it; of the two, the one that was lower is scaled.
    """
    tops = tl.full((BLOCK,), -1e38, tl.float32)
    totals = tl.zeros((BLOCK,), tl.float32)
    rivals = tl.full((BLOCK,), -float("inf"), tl.float32)
    for first in range(0, width, BLOCK):
        u = first + tl.arange(0, BLOCK)
        biased = _biased(scores, bias, place, own, u, scale, width, stride)
        fall = tl.exp(-tl.abs(biased - tops))
        totals = tl.where(biased > tops, totals * fall + 1.0, totals + fall)
        tops = tl.maximum(tops, biased)
        rivals = tl.maximum(rivals, tl.where(u == place, -float("inf"), biased))
    top = tl.max(tops, 0)
    return top + tl.log(tl.sum(totals * tl.exp(tops - top), 0)), tl.max(rivals, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _biased(scores, bias, place, own, u, scale, width, stride):  # type: ignore[no-untyped-def]
    """Scores of the candidates u, with biases; the target's is `own`; -inf outside.

    Read is up to `stride`, a multiple of what a load moves at once, which `width` need not be.
    """
    biased = tl.load(scores + u, mask=u < stride, other=0.0) * scale
    if bias is not None:
        biased += tl.load(bias + u, mask=u < stride, other=0.0)
    return tl.where(u == place, own, tl.where(u < width, biased, -float("inf")))
