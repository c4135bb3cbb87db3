"""The softmax of a chunk of outputs as one Triton kernel, between cuBLAS products: one program for each output.

A program reads its row of scores once for their logsumexp, and again, from a cache, to write score gradients in the
dtype of the following products; in bf16 and float32 they overwrite the scores. For candidates split over ranks the
kernel runs twice, with a small all-gather in between.

Bytes moved per score by the forward and backward pass, including the score gradient and the two products that read it:
10 in bf16, or 12 if the second read misses the cache. With float32 scores and separate gradients: 14 or 18.

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
from megahead.losses.fused_softmax import ChunkSoftmax, ScoreGradients, SoftmaxStats
from megahead.losses.scores import Score

BLOCK = 1024
"""Scores per iteration of a program, 8 for each thread of 4 warps: 16 bytes in bf16."""

WARPS = 4

ALIGNMENT = 16
"""Rows of the buffers and biases are padded to a multiple of this number of elements, so that loads and products move
16 bytes at once for any number of candidates."""


class TritonChunkSoftmax(ChunkSoftmax):
    """A `ChunkSoftmax` for GPUs, on half-precision or float32 inputs of one dtype, for scores that are the product
    times a factor (`Score.is_linear`).

    Statistics are float32. Scores are float32, except in a loss on bf16 inputs: there they are bf16, with relative
    errors of at most 2^-8. With s the largest score of an output, its loss changes by at most 2^-7 s, and the relative
    change of a probability is at most 2^-7 s, to first order. Scores of float16 inputs stay float32, since float16
    could overflow."""

    def __init__(
        self,
        outputs_ND: Tensor,
        rows_wD: Tensor,
        candidates: Candidates,
        score: Score,
        group: Group,
        with_gradients: bool = True,
    ) -> None:
        super().__init__(outputs_ND, rows_wD, candidates, score, group)
        biases = candidates.bias_U, candidates.as_target_bias_U
        bias_w, as_target_bias_w = (None if bias is None else bias.detach().float() for bias in biases)
        self._biases = None if bias_w is None else _pad_bias(bias_w), as_target_bias_w
        dtype = self.gradient_dtype = rows_wD.dtype
        score_dtype = torch.bfloat16 if with_gradients and dtype == torch.bfloat16 else torch.float32
        has_gradient_buffer = with_gradients and dtype != score_dtype
        score_size = score_dtype.itemsize + (dtype.itemsize if has_gradient_buffer else 0)
        self.chunk_size = GPU_CHUNKS.outputs_per_chunk(outputs_ND.shape[0], len(rows_wD), score_size)
        shape = self.chunk_size, triton.cdiv(len(rows_wD), ALIGNMENT) * ALIGNMENT
        self._scores = rows_wD.new_empty(shape, dtype=score_dtype)
        self._score_gradients = rows_wD.new_empty(shape) if has_gradient_buffer else self._scores

    def stats(self, outputs_nD: Tensor, target_n: Tensor) -> SoftmaxStats:
        return self._reduce_over_ranks(
            self._run_kernel(self._compute_scores(outputs_nD), target_n, score_gradients=False)
        )

    def score_gradients(self, outputs_nD: Tensor, target_n: Tensor) -> ScoreGradients:
        scores_nw = self._compute_scores(outputs_nD)
        is_single_rank = self._group.size == 1
        stats = self._reduce_over_ranks(self._run_kernel(scores_nw, target_n, score_gradients=is_single_rank))
        if not is_single_rank:
            self._run_kernel(scores_nw, target_n, score_gradients=True, stats=stats)
        loss_n = stats.lse - self._target_logit(stats.target_score, stats.biased_target_score)
        return ScoreGradients(loss_n, self._score_gradients[: len(scores_nw), : scores_nw.shape[1]], None)

    def matmul_(self, result: Tensor, left: Tensor, right: Tensor) -> None:
        if left.dtype == result.dtype:
            torch.mm(left, right, out=result)
        elif left.device.type == "cpu":  # torch lacks this mixed-dtype product there
            torch.mm(left.to(result.dtype), right.to(result.dtype), out=result)
        else:
            torch.mm(left, right, out_dtype=result.dtype, out=result)

    def add_matmul_(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        if left.device.type == "cpu":
            total.addmm_(left.to(total.dtype), right.to(total.dtype))
        else:
            torch.addmm(total, left, right, out_dtype=total.dtype, out=total)

    def _compute_scores(self, outputs_nD: Tensor) -> Tensor:
        """[n, w]: the products, without temperature and biases."""
        scores_nw = self._scores[: len(outputs_nD), : len(self._rows_wD)]
        self.matmul_(scores_nw, outputs_nD, self._rows_wD.T)
        return scores_nw

    def _run_kernel(
        self, scores_nw: Tensor, target_n: Tensor, score_gradients: bool, stats: SoftmaxStats | None = None
    ) -> Tensor:
        """Runs the kernel. Returns this rank's `SoftmaxStats`, [4, n], unless those of all ranks are passed; fills the
        gradient buffer if `score_gradients`."""
        count, width = scores_nw.shape
        sums_4n = scores_nw.new_empty(4, count, dtype=torch.float32)
        buffers = scores_nw, self._score_gradients if score_gradients else None, sums_4n
        known = (None, None) if stats is None else (stats.lse, stats.biased_target_score)
        numbers = self._score.scale, count, width, scores_nw.stride(0)
        with torch.cuda.device_of(scores_nw):  # Triton launches on the current device
            _softmax_kernel[(count,)](*buffers, *known, target_n, *self._biases, *numbers, BLOCK=BLOCK, num_warps=WARPS)
        return sums_4n

    def _reduce_over_ranks(self, sums_4n: Tensor) -> SoftmaxStats:
        """The `SoftmaxStats` over all ranks' candidates from each rank's [4, n]."""
        if self._group.size == 1:
            return SoftmaxStats(*sums_4n.unbind())
        lse, target, biased, best_other = self._group.all_gather(sums_4n).unbind(dim=1)
        return SoftmaxStats(lse.logsumexp(dim=0), target.sum(dim=0), biased.sum(dim=0), best_other.amax(dim=0))


def _pad_bias(bias_w: Tensor) -> Tensor:
    """The bias padded to the length of the buffers' rows; the kernel ignores the padding."""
    missing = -len(bias_w) % ALIGNMENT
    return F.pad(bias_w, (0, missing)) if missing else bias_w


@triton.jit  # type: ignore[untyped-decorator]
def _softmax_kernel(  # type: ignore[no-untyped-def]
    scores,
    score_gradients,
    sums,
    lse,
    known_target_score,
    target,
    bias,
    as_target_bias,
    scale,
    count,
    width,
    stride,
    BLOCK: tl.constexpr,
):
    """Writes one output's statistics, unless `lse` and the target's biased score are passed, and its score gradients,
    if that buffer is passed. It may be the scores' buffer: before the first write every warp has read the target's
    score, or was passed it."""
    n = tl.program_id(0)
    scores += n.to(tl.int64) * stride
    index = tl.load(target + n)
    is_local = (index >= 0) & (index < width)
    index = tl.where(is_local, index, -1)  # another rank's index may be within the padding
    if lse is None:
        score = tl.load(scores + index, mask=is_local, other=0.0).to(tl.float32) * scale
        target_score = score
        if as_target_bias is not None:
            target_score += tl.load(as_target_bias + index, mask=is_local, other=0.0)
        elif bias is not None:
            target_score += tl.load(bias + index, mask=is_local, other=0.0)
        log_sum, best_other = _reduce_scores(scores, bias, index, target_score, scale, width, stride, BLOCK)
        tl.store(sums + n, log_sum)
        tl.store(sums + count + n, score)
        tl.store(sums + 2 * count + n, target_score)
        tl.store(sums + 3 * count + n, best_other)
    else:
        log_sum, target_score = tl.load(lse + n), tl.load(known_target_score + n)
    if score_gradients is not None:
        score_gradients += n.to(tl.int64) * stride
        for first in range(0, width, BLOCK):
            u = first + tl.arange(0, BLOCK)
            biased = _load_biased_scores(scores, bias, index, target_score, u, scale, width, stride)
            values = tl.exp(biased - log_sum) - tl.where(u == index, 1.0, 0.0)
            tl.store(score_gradients + u, values.to(score_gradients.dtype.element_ty), mask=u < stride)


@triton.jit  # type: ignore[untyped-decorator]
def _reduce_scores(scores, bias, index, target_score, scale, width, stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the row's logsumexp and its largest score besides the target's, with one exponential per score.

    Each lane has a running maximum and the sum of exponentials relative to it, rescaled when the maximum grows.
    """
    maxima = tl.full((BLOCK,), -1e38, tl.float32)
    totals = tl.zeros((BLOCK,), tl.float32)
    best_other = tl.full((BLOCK,), -float("inf"), tl.float32)
    for first in range(0, width, BLOCK):
        u = first + tl.arange(0, BLOCK)
        biased = _load_biased_scores(scores, bias, index, target_score, u, scale, width, stride)
        rescale = tl.exp(-tl.abs(biased - maxima))
        totals = tl.where(biased > maxima, totals * rescale + 1.0, totals + rescale)
        maxima = tl.maximum(maxima, biased)
        best_other = tl.maximum(best_other, tl.where(u == index, -float("inf"), biased))
    maximum = tl.max(maxima, 0)
    return maximum + tl.log(tl.sum(totals * tl.exp(maxima - maximum), 0)), tl.max(best_other, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _load_biased_scores(scores, bias, index, target_score, u, scale, width, stride):  # type: ignore[no-untyped-def]
    """Biased scores of the candidates `u`: `target_score` for the target, -inf beyond `width`.

    Loads up to `stride`, which unlike `width` is a multiple of `ALIGNMENT`.
    """
    biased = tl.load(scores + u, mask=u < stride, other=0.0).to(tl.float32) * scale
    if bias is not None:
        biased += tl.load(bias + u, mask=u < stride, other=0.0)
    return tl.where(u == index, target_score, tl.where(u < width, biased, -float("inf")))
