"""The softmax over candidates as three N x w x D matmuls, in one chunk of outputs if its scores fit in memory.

The first gives a chunk's scores, from which a `ChunkSoftmax` computes their gradients (on CPUs with torch operations,
on GPUs with a kernel); the others give the gradients of outputs and rows. All run in the forward pass, so that nothing
is computed twice. Never synchronizes the device, and uses no atomic additions, so that results are deterministic.

N outputs, n of a chunk; D features; w candidates of this rank (all of them where there is one rank).
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megahead.config.objective import CPU_CHUNKS
from megahead.distributed.group import Group, has_fast_bf16
from megahead.losses.candidates import Candidates
from megahead.losses.scores import Score

MIN_SHIFTED_SCORE = -60.0
"""Scores minus the largest one are clamped to at least this: e^-60 is lost in rounding anyway, while the denormal
numbers around e^-90 make the following products 13 times slower on a CPU, and e^-inf takes 18 times as long as other
exponentials (measured, one core, 512 x 16,384 and 256 x 20,000)."""


class SoftmaxStats(NamedTuple):
    """Statistics of each output's softmax over all ranks' candidates; [n] each, in the dtype of the scores."""

    lse: Tensor
    """Logarithm of the sum of exponentials of the biased scores."""
    target_score: Tensor
    """The target's score without bias."""
    biased_target_score: Tensor
    """The target's score with bias."""
    best_other_score: Tensor
    """Largest biased score of the other candidates."""

    def combine(self, other: SoftmaxStats) -> SoftmaxStats:
        """The statistics over both sets of candidates; those without the target have target scores 0."""
        return SoftmaxStats(
            torch.logaddexp(self.lse, other.lse),
            self.target_score + other.target_score,
            self.biased_target_score + other.biased_target_score,
            torch.maximum(self.best_other_score, other.best_other_score),
        )


class ScoreGradients(NamedTuple):
    """The loss of a chunk and its gradient w.r.t. the scores: probabilities, minus 1 at the target."""

    loss_n: Tensor
    """Each output's loss, over all ranks' candidates."""
    matrix_nw: Tensor
    """`weight_n1 * matrix_nw` is the gradient w.r.t. this rank's scores. In the products' dtype; the next chunk
    overwrites it."""
    weight_n1: Tensor | None
    """Factors of the rows of `matrix_nw`; None: ones."""
    derivatives_nw: Tensor | None = None
    """Derivatives of the scores w.r.t. outputs @ rows, divided by `Score.scale`; None: ones."""

    def apply_weights(self, weight_n: Tensor) -> ScoreGradients:
        """The gradients of the losses times `weight_n`."""
        weight_n1 = weight_n[:, None].to(self.loss_n.dtype)
        weight_n1 = weight_n1 if self.weight_n1 is None else self.weight_n1 * weight_n1
        return self._replace(loss_n=self.loss_n * weight_n.to(self.loss_n.dtype), weight_n1=weight_n1)


class ChunkSoftmax(ABC):
    """Computes the scores of a chunk of outputs and their softmax. Collective over the ranks that share candidates."""

    chunk_size: int
    """Largest number of outputs in a chunk."""

    gradient_dtype: torch.dtype
    """Dtype of the outputs' gradient, in which ranks are summed."""

    def __init__(self, outputs_ND: Tensor, rows_wD: Tensor, candidates: Candidates, score: Score, group: Group) -> None:
        self._rows_wD, self._score, self._group, self._target_logit = rows_wD, score, group, candidates.target_logit

    @abstractmethod
    def stats(self, outputs_nD: Tensor, target_n: Tensor) -> SoftmaxStats:
        """target_n: indices into this rank's candidates; out of range for targets on other ranks."""

    @abstractmethod
    def score_gradients(self, outputs_nD: Tensor, target_n: Tensor) -> ScoreGradients:
        """Arguments as in `stats`."""

    def matmul_(self, result: Tensor, left: Tensor, right: Tensor) -> None:
        """result = left @ right."""
        torch.mm(left, right, out=result)

    @abstractmethod
    def add_matmul_(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        """total += left @ right, accumulated in the dtype of `total`."""


class TorchChunkSoftmax(ChunkSoftmax):
    """Uses torch operations; exponentials overwrite the scores. Two small all-reduces per chunk."""

    def __init__(self, outputs_ND: Tensor, rows_wD: Tensor, candidates: Candidates, score: Score, group: Group) -> None:
        super().__init__(outputs_ND, rows_wD, candidates, score, group)
        width, dtype = rows_wD.shape[0], torch.promote_types(rows_wD.dtype, torch.float32)
        bias_w, as_target_bias_w = candidates.bias_U, candidates.as_target_bias_U
        self._bias_w = rows_wD.new_zeros(width, dtype=dtype) if bias_w is None else bias_w.detach().to(dtype)
        self._as_target_bias_w = None if as_target_bias_w is None else as_target_bias_w.to(dtype)
        self.chunk_size = CPU_CHUNKS.outputs_per_chunk(outputs_ND.shape[0], width, dtype.itemsize)
        self._buffer, self.gradient_dtype = rows_wD.new_empty(self.chunk_size, width, dtype=dtype), dtype

    def stats(self, outputs_nD: Tensor, target_n: Tensor) -> SoftmaxStats:
        scores = self._compute_scores(outputs_nD, target_n)
        scores_nw, is_local_n1 = scores.scores_nw, scores.is_local_n1
        lse_n = self._group.all_gather(scores_nw.logsumexp(dim=1)).logsumexp(dim=0)
        target_n, biased_n = self._group.all_reduce_(scores.target_scores_n2).unbind(dim=1)
        target_score_n1 = scores_nw.gather(1, scores.index_n1)
        scores_nw.scatter_(1, scores.index_n1, target_score_n1.masked_fill(is_local_n1, -torch.inf))
        return SoftmaxStats(lse_n, target_n, biased_n, self._group.all_reduce_max_(scores_nw.amax(dim=1)))

    def score_gradients(self, outputs_nD: Tensor, target_n: Tensor) -> ScoreGradients:
        scores_nw, index_n1, is_local_n1, target_scores_n2, derivatives_nw = self._compute_scores(outputs_nD, target_n)
        top_n1 = self._group.all_reduce_max_(scores_nw.amax(dim=1, keepdim=True))
        scores_nw.sub_(top_n1).clamp_min_(MIN_SHIFTED_SCORE).exp_()
        sums_n3 = torch.cat([scores_nw.sum(dim=1, keepdim=True), target_scores_n2], dim=1)
        total_n1, *target_scores = self._group.all_reduce_(sums_n3).split(1, dim=1)
        scores_nw.scatter_add_(1, index_n1, -total_n1 * is_local_n1)
        loss_n1 = top_n1 + total_n1.log() - self._target_logit(*target_scores)
        return ScoreGradients(loss_n1.squeeze(1), scores_nw, 1 / total_n1, derivatives_nw)

    def sample(self, outputs_nD: Tensor, target_n: Tensor, uniform_n: Tensor) -> Tensor:
        """int64 [n]: the index of a candidate sampled from each output's softmax, or -1 where another rank has it.

        Inverse transform sampling: the candidate at which the cumulative probability, in the order of ranks and
        indices, passes `uniform_n` (float64 in (0, 1)). If all candidates have the weight 0: the target.
        """
        scores_nw, index_n1, is_local_n1, _, _ = self._compute_scores(outputs_nD, target_n)
        top_n1 = self._group.all_reduce_max_(scores_nw.amax(dim=1, keepdim=True))
        scores_nw.sub_(top_n1).clamp_min_(MIN_SHIFTED_SCORE).exp_()
        cumulative_nk = _cumulative_sums(_block_sums(scores_nw))
        cumulative_Rn = _cumulative_sums(self._group.all_gather(cumulative_nk[:, -1].contiguous()).T).T
        threshold_n, rank = uniform_n * cumulative_Rn[-1], self._group.rank
        is_local_n = (cumulative_Rn[:-1] <= threshold_n).sum(dim=0) == rank
        local_threshold_n = threshold_n - cumulative_Rn[rank - 1] if rank else threshold_n
        index_n = _search_cumulative(scores_nw, cumulative_nk, local_threshold_n)
        has_no_weight_n = cumulative_Rn[-1].isnan()  # -inf minus -inf
        index_n = torch.where(has_no_weight_n, index_n1.squeeze(1), index_n)
        return torch.where(torch.where(has_no_weight_n, is_local_n1.squeeze(1), is_local_n), index_n, -1)

    def add_matmul_(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        total.addmm_(left, right)

    def _compute_scores(self, outputs_nD: Tensor, target_n: Tensor) -> _ChunkScores:
        scores_nw, width = self._buffer[: len(outputs_nD)], self._buffer.shape[1]
        derivatives_nw = self._fill_biased_scores_(scores_nw, outputs_nD)
        is_local_n1 = ((target_n >= 0) & (target_n < width))[:, None]
        index_n = target_n.clamp(0, width - 1)
        biased_n1 = scores_nw.gather(1, index_n[:, None])
        if self._as_target_bias_w is None:
            target_n1 = biased_n1 - self._bias_w[index_n, None]
        else:
            target_n1 = (outputs_nD * self._rows_wD[index_n]).sum(dim=1, keepdim=True, dtype=scores_nw.dtype)
            self._score.to_similarity_(target_n1)
            target_n1 *= self._score.scale
            biased_n1 = biased_n1.where(~is_local_n1, target_n1 + self._as_target_bias_w[index_n, None])
            scores_nw.scatter_(1, index_n[:, None], biased_n1)
        target_scores_n2 = torch.cat([target_n1, biased_n1], dim=1).where(is_local_n1, 0.0)
        return _ChunkScores(scores_nw, index_n[:, None], is_local_n1, target_scores_n2, derivatives_nw)

    def _fill_biased_scores_(self, scores_nw: Tensor, outputs_nD: Tensor) -> Tensor | None:
        """Fills `scores_nw` with biased scores; returns the derivatives of the similarities."""
        if self._score.is_linear:
            torch.addmm(self._bias_w, outputs_nD, self._rows_wD.T, alpha=self._score.scale, out=scores_nw)
            return None
        derivatives_nw = self._score.to_similarity_(torch.mm(outputs_nD, self._rows_wD.T, out=scores_nw))
        scores_nw.mul_(self._score.scale).add_(self._bias_w)
        return derivatives_nw


_SAMPLING_BLOCK = 512


def _block_sums(weights_nw: Tensor) -> Tensor:
    """float64 [n, k]: the sums of blocks of _SAMPLING_BLOCK weights; the last block may have fewer (or none)."""
    num_full = weights_nw.shape[1] // _SAMPLING_BLOCK
    sums_nk = weights_nw[:, : num_full * _SAMPLING_BLOCK].unflatten(1, (num_full, _SAMPLING_BLOCK)).sum(dim=2)
    rest_n1 = weights_nw[:, num_full * _SAMPLING_BLOCK :].sum(dim=1, keepdim=True)
    return torch.cat([sums_nk, rest_n1], dim=1).double()


def _cumulative_sums(values_nk: Tensor) -> Tensor:
    """[n, k]: the cumulative sums of each row; in torch's deterministic mode, which refuses `cumsum` of floats on GPUs,
    a product with ones."""
    if not torch.are_deterministic_algorithms_enabled():
        return values_nk.cumsum(dim=1)
    count = values_nk.shape[1]
    return values_nk @ values_nk.new_ones(count, count).triu()


def _search_cumulative(weights_nw: Tensor, cumulative_nk: Tensor, threshold_n: Tensor) -> Tensor:
    """int64 [n]: the index at which the cumulative sum of weights passes `threshold_n`. `cumulative_nk`: the cumulative
    sums of blocks, so that only one block is summed in float64: to sum all would take longer than their matmul."""
    threshold_n1, last = threshold_n[:, None], weights_nw.shape[1] - 1
    block_n1 = torch.searchsorted(cumulative_nk, threshold_n1, right=True).clamp_max(cumulative_nk.shape[1] - 1)
    end_n1 = cumulative_nk.gather(1, block_n1)
    start_n1 = cumulative_nk.gather(1, (block_n1 - 1).clamp_min(0)).where(block_n1 > 0, 0.0)
    index_nb = block_n1 * _SAMPLING_BLOCK + torch.arange(_SAMPLING_BLOCK, device=weights_nw.device)
    inside_nb = weights_nw.gather(1, index_nb.clamp_max(last)).where(index_nb <= last, 0.0)
    inside_nb = _cumulative_sums(inside_nb.double())
    share_n1 = (threshold_n1 - start_n1) / (end_n1 - start_n1)  # of the block's sum, which was rounded
    offset_n1 = torch.searchsorted(inside_nb, share_n1 * inside_nb[:, -1:], right=True)
    return (block_n1 * _SAMPLING_BLOCK + offset_n1).squeeze(1).clamp(0, last)


class _ChunkScores(NamedTuple):
    """A chunk's biased scores, and the indices of its targets."""

    scores_nw: Tensor
    index_n1: Tensor
    is_local_n1: Tensor
    """bool: whether this rank has the target; if not, `index_n1` is arbitrary."""
    target_scores_n2: Tensor
    """Scores of targets without and with bias; 0 for other ranks' targets."""
    derivatives_nw: Tensor | None
    """As in `ScoreGradients`."""


# Products in bf16, for CPUs that support them. torch rounds scores to bf16, as for a bf16 head in Megatron or under
# autocast. Their softmax, the loss and the sums of gradients are in float32; score gradients are rounded once more for
# the products that read them, as on GPUs.


class Bf16ChunkSoftmax(TorchChunkSoftmax):
    """A `ChunkSoftmax` on bf16 inputs, for losses with linear scores."""

    def __init__(self, outputs_ND: Tensor, rows_wD: Tensor, candidates: Candidates, score: Score, group: Group) -> None:
        super().__init__(outputs_ND, rows_wD, candidates, score, group)
        self._bf16_buffer = rows_wD.new_empty(self._buffer.shape)
        """A chunk's scores and, once these are copied, its score gradients."""

    def score_gradients(self, outputs_nD: Tensor, target_n: Tensor) -> ScoreGradients:
        score_gradients = super().score_gradients(outputs_nD, target_n)
        return score_gradients._replace(matrix_nw=self._bf16_buffer[: len(outputs_nD)].copy_(score_gradients.matrix_nw))

    def matmul_(self, result: Tensor, left: Tensor, right: Tensor) -> None:
        result.copy_(self._multiply(left, right))

    def add_matmul_(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        total.add_(self._multiply(left, right))

    def _multiply(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.mm(left.to(self._bf16_buffer.dtype), right.to(self._bf16_buffer.dtype))

    def _fill_biased_scores_(self, scores_nw: Tensor, outputs_nD: Tensor) -> None:
        rounded_nw = torch.mm(outputs_nD, self._rows_wD.T, out=self._bf16_buffer[: len(outputs_nD)])
        scores_nw.copy_(rounded_nw).mul_(self._score.scale).add_(self._bias_w)


# The loss, the statistics for evaluation, and sampling, over all chunks.


def fused_softmax_loss(
    outputs_ND: Tensor, rows_wD: Tensor, candidates: Candidates, score: Score, group: Group
) -> Tensor:
    """`candidate_loss` for N > 0, over all ranks' candidates, on every rank of `group`.

    outputs_ND, rows_wD: results of `score.transform_outputs` and `score.transform_rows`.

    `candidates`: this rank's biases [w] (-inf: padding), and targets as indices into this rank's rows (out of range:
    another rank's). `as_target_bias_U` replaces the bias of a candidate for the outputs whose target it is. The
    outputs' gradient is summed over the ranks. Saves for the backward pass only both gradients, N x D in the inputs'
    dtype (on CPUs float32) and w x D in float32. Collective.
    """
    dtype, bias_w = loss_dtype(outputs_ND, rows_wD, score), candidates.bias_U
    if bias_w is not None and bias_w.requires_grad and not candidates.target_logit_has_bias:
        raise ValueError("a bias with a gradient must be in the numerator, too (target_logit_has_bias)")
    inputs = outputs_ND.to(dtype), rows_wD.to(dtype), bias_w
    loss: Tensor = _FusedSoftmax.apply(*inputs, candidates, score, group)
    return loss


def softmax_stats(
    outputs_ND: Tensor, rows_wD: Tensor, candidates: Candidates, score: Score, group: Group
) -> SoftmaxStats:
    """The `SoftmaxStats` of all outputs, without gradients; arguments as in `fused_softmax_loss`. Collective."""
    if outputs_ND.shape[0] == 0:
        return SoftmaxStats(*outputs_ND.new_zeros(4, 0))
    dtype = matmul_dtype(outputs_ND, rows_wD, score)
    outputs_ND = outputs_ND.to(dtype)
    softmax = build_chunk_softmax(outputs_ND, rows_wD.to(dtype), candidates, score, group, with_gradients=False)
    parts = [softmax.stats(outputs_ND[part], candidates.target_N[part]) for part in _chunk_slices(softmax, outputs_ND)]
    return SoftmaxStats(*map(torch.cat, zip(*parts, strict=True)))


def sample_candidates(
    outputs_ND: Tensor, rows_wD: Tensor, candidates: Candidates, score: Score, group: Group, uniform_N: Tensor
) -> Tensor:
    """int64 [N]: indices of candidates sampled by `TorchChunkSoftmax.sample`, on any device in float32 or float64; -1
    where another rank has the candidate. Arguments as in `fused_softmax_loss`. Collective."""
    if outputs_ND.shape[0] == 0:
        return torch.zeros(0, dtype=torch.int64, device=outputs_ND.device)
    dtype = torch.promote_types(torch.promote_types(outputs_ND.dtype, rows_wD.dtype), torch.float32)
    outputs_ND = outputs_ND.to(dtype)
    with without_autocast(outputs_ND.device):
        softmax = TorchChunkSoftmax(outputs_ND, rows_wD.to(dtype), candidates, score, group)
        parts = _chunk_slices(softmax, outputs_ND)
        samples = [softmax.sample(outputs_ND[part], candidates.target_N[part], uniform_N[part]) for part in parts]
    return torch.cat(samples)


def supports_kernel(tensor: Tensor) -> bool:
    """Whether the device and dtype can use the GPU kernel."""
    return tensor.is_cuda and tensor.dtype != torch.float64


def uses_kernel(outputs_ND: Tensor, score: Score) -> bool:
    """Whether these outputs use the GPU kernel. A score that is not linear uses float32 torch operations on every
    device."""
    return supports_kernel(outputs_ND) and score.is_linear


def loss_dtype(outputs_ND: Tensor, rows_wD: Tensor, score: Score) -> torch.dtype:
    """The dtype of the operands of a loss's products: `matmul_dtype`, but bf16 on CPUs that multiply it fast, where a
    GPU would use it."""
    dtype = _input_dtype(outputs_ND, rows_wD)
    is_fast = outputs_ND.device.type == "cpu" and dtype == torch.bfloat16 and has_fast_bf16(outputs_ND.device)
    return dtype if is_fast and score.is_linear else matmul_dtype(outputs_ND, rows_wD, score)


def matmul_dtype(outputs_ND: Tensor, rows_wD: Tensor, score: Score) -> torch.dtype:
    """The dtype of the operands of products: for the kernel that of the inputs or of autocast; else float32, or float64
    if either input has it."""
    dtype = _input_dtype(outputs_ND, rows_wD)
    return dtype if uses_kernel(outputs_ND, score) else torch.promote_types(dtype, torch.float32)


def _input_dtype(outputs_ND: Tensor, rows_wD: Tensor) -> torch.dtype:
    """The dtype of autocast, or that of the inputs: half precision if both have it, else float32, or float64 if either
    has it."""
    dtype = torch.promote_types(outputs_ND.dtype, rows_wD.dtype)
    if dtype.itemsize <= 4 and torch.is_autocast_enabled(outputs_ND.device.type):
        return torch.get_autocast_dtype(outputs_ND.device.type)
    return dtype if dtype.itemsize == 2 else torch.promote_types(dtype, torch.float32)


def build_chunk_softmax(
    outputs_ND: Tensor, rows_wD: Tensor, candidates: Candidates, score: Score, group: Group, with_gradients: bool = True
) -> ChunkSoftmax:
    """The implementation for the inputs' device, with buffers for chunks of these outputs. `with_gradients`: whether
    score gradients are needed, too; the scores of bf16 inputs are then rounded to bf16."""
    if uses_kernel(outputs_ND, score):
        return _triton_chunk_softmax()(outputs_ND, rows_wD, candidates, score, group, with_gradients)
    softmax_class = Bf16ChunkSoftmax if rows_wD.dtype == torch.bfloat16 else TorchChunkSoftmax
    return softmax_class(outputs_ND, rows_wD, candidates, score, group)


@cache
def _triton_chunk_softmax() -> Callable[..., ChunkSoftmax]:
    """The class, imported when it is first used: only torch for CUDA installs triton."""
    softmax_class: type[ChunkSoftmax] = importlib.import_module("megahead.losses.triton_kernel").TritonChunkSoftmax
    return softmax_class


def _chunk_slices(softmax: ChunkSoftmax, outputs_ND: Tensor) -> Iterator[slice]:
    total = outputs_ND.shape[0]
    return (slice(start, min(start + softmax.chunk_size, total)) for start in range(0, total, softmax.chunk_size))


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Turns autocast off, if it is on: this check takes the host less time than entering `torch.autocast`."""
    is_on = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if is_on else nullcontext()


class _FusedSoftmax(torch.autograd.Function):
    """Computes gradients in the forward pass, while a chunk's scores are in memory, so that none is computed twice."""

    @staticmethod
    def forward(
        ctx: Any,
        outputs_ND: Tensor,
        rows_wD: Tensor,
        bias_w: Tensor | None,
        candidates: Candidates,
        score: Score,
        group: Group,
    ) -> Tensor:
        with without_autocast(outputs_ND.device):
            softmax = build_chunk_softmax(outputs_ND, rows_wD, candidates, score, group)
            gradients = _Gradients(outputs_ND, rows_wD, softmax, needs_bias=ctx.needs_input_grad[2])
            losses = []
            for part in _chunk_slices(softmax, outputs_ND):
                score_gradients = softmax.score_gradients(outputs_ND[part], candidates.target_N[part])
                if candidates.weight_N is not None:
                    score_gradients = score_gradients.apply_weights(candidates.weight_N[part])
                losses.append(score_gradients.loss_n)
                if any(ctx.needs_input_grad):
                    gradients.add(part, score_gradients)
            group.all_reduce_(gradients.outputs)
        ctx.save_for_backward(gradients.outputs, gradients.rows, gradients.bias)
        ctx.scale, ctx.dtype = score.scale, outputs_ND.dtype
        return (torch.cat(losses) if len(losses) > 1 else losses[0]).sum()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad_outputs, grad_rows, grad_bias = ctx.saved_tensors
        factor = grad_loss if ctx.scale == 1.0 else grad_loss * ctx.scale
        scaled = (_multiply(gradient, factor, ctx.dtype) for gradient in (grad_outputs, grad_rows))
        gradients = *scaled, None if grad_bias is None else grad_bias * grad_loss
        if torch.is_grad_enabled():  # create_graph=True
            zero = _RefuseSecondDerivative.apply(grad_loss.new_zeros((), requires_grad=True))
            gradients = tuple(grad if grad is None else grad + zero.to(grad.dtype) for grad in gradients)
        return *gradients, None, None, None


def _multiply(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """`gradient * factor`, rounded once to `dtype`; in one GPU kernel, unless it must be differentiable."""
    factor = factor[None]  # on GPUs a 0-dim factor would be rounded to the dtype of `gradient`: in bf16 by up to 2^-8
    if torch.is_grad_enabled():
        return (gradient * factor).to(dtype)
    return torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=dtype))


class _RefuseSecondDerivative(torch.autograd.Function):
    """A zero whose backward pass raises: without it autograd would treat the gradients as constants in outputs and
    rows. Differentiating by `grad_loss` still works."""

    @staticmethod
    def forward(ctx: Any, zero: Tensor) -> Tensor:
        return zero.clone()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:  # type: ignore[override]
        raise RuntimeError(
            "the softmax over candidates must be differentiated once, but a second derivative was requested; compute "
            "the loss by `candidate_loss_reference`, or without create_graph."
        )


class _Gradients:
    """Accumulates the loss's gradients w.r.t. outputs and rows (divided by the score's scale) and biases over
    chunks."""

    def __init__(self, outputs_ND: Tensor, rows_wD: Tensor, softmax: ChunkSoftmax, needs_bias: bool) -> None:
        total_dtype = torch.promote_types(rows_wD.dtype, torch.float32)
        self._inputs, self._softmax = (outputs_ND, rows_wD), softmax
        self.outputs = torch.empty_like(outputs_ND, dtype=softmax.gradient_dtype)
        self.rows, self._is_first_chunk = torch.empty_like(rows_wD, dtype=total_dtype), True
        self.bias = rows_wD.new_zeros(len(rows_wD), dtype=total_dtype) if needs_bias else None

    def add(self, part: slice, score_gradients: ScoreGradients) -> None:
        """Sets the gradients of the outputs of `part`, and adds its gradients of rows and biases."""
        (outputs_ND, rows_wD), (_, matrix_nw, weight_n1, derivatives_nw) = self._inputs, score_gradients
        outputs_nD, gradient_nD = outputs_ND[part], self.outputs[part]
        if self.bias is not None:  # the loss subtracts the target's bias: its gradient has the same -1 as the scores'
            if weight_n1 is None:
                self.bias.add_(matrix_nw.sum(0, dtype=self.bias.dtype))
            else:
                self._softmax.add_matmul_(self.bias[None], weight_n1.T.to(matrix_nw.dtype), matrix_nw)
        if derivatives_nw is not None:
            matrix_nw.mul_(derivatives_nw)
        self._softmax.matmul_(gradient_nD, matrix_nw, rows_wD)
        if weight_n1 is not None:
            gradient_nD.mul_(weight_n1)
            outputs_nD = torch.mul(outputs_nD, weight_n1, out=torch.empty_like(outputs_nD))
        add_to_rows = self._softmax.matmul_ if self._is_first_chunk else self._softmax.add_matmul_
        add_to_rows(self.rows, matrix_nw.T, outputs_nD)
        self._is_first_chunk = False
