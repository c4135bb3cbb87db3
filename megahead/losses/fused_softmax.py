"""The softmax over candidates in three products of N x w x D, chunk by chunk of outputs: N x w scores are never held.

One product gives a chunk's scores, a `ChunkSoftmax` their residuals (on CPUs by torch's operations, on GPUs by a
kernel), two products both gradients: in the forward pass, so that nothing is computed twice. Nothing waits for the
device, and nothing is added atomically, not to a learned bias either: results do not vary.

N outputs, n of a chunk; D features; w candidates of this rank (all of them where there is one rank).
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megahead.config.objective import CPU_CHUNKS
from megahead.distributed.group import Group, has_fast_bf16
from megahead.losses.candidates import Candidates
from megahead.losses.scores import Score

LEAST_SHIFTED_SCORE = -60.0
"""Scores, after the largest was subtracted, are clamped to at least this: e^-60 is lost in rounding anyway, while the
denormal numbers around e^-90 make the products that follow 13 times slower on a CPU, and e^-inf takes 18 times as long
as others (measured, one core, 512 x 16,384 and 256 x 20,000)."""


class RowSums(NamedTuple):
    """What is needed of each output's softmax over all ranks' candidates; [n] each, in the type of the scores."""

    lse: Tensor
    """Logarithm of the sum of all exponentials of biased scores."""
    target: Tensor
    """Score of the target without its bias."""
    biased: Tensor
    """Score of the target with its bias."""
    rivals: Tensor
    """Largest biased score of the other candidates."""

    def combine(self, other: RowSums) -> RowSums:
        """Those over the candidates of both, each of which has the target or zeros in its place."""
        lse, rivals = torch.logaddexp(self.lse, other.lse), torch.maximum(self.rivals, other.rivals)
        return RowSums(lse, self.target + other.target, self.biased + other.biased, rivals)


class Residuals(NamedTuple):
    """The gradient of a chunk's loss by its scores: probabilities, minus 1 at the target."""

    loss_n: Tensor
    """Of each output, over all ranks' candidates."""
    matrix_nw: Tensor
    """The gradient by this rank's scores, in the type that products read, divided by `weight_n1`; a buffer."""
    weight_n1: Tensor | None
    """None: ones."""
    derivatives_nw: Tensor | None = None
    """Of the scores by the products that they come from, divided by the scale; None: ones."""

    def weighted(self, weight_n: Tensor) -> Residuals:
        """Of losses that count so often."""
        weight_n1 = weight_n[:, None].to(self.matrix_nw.dtype)
        both_n1 = weight_n1 if self.weight_n1 is None else self.weight_n1 * weight_n1
        return self._replace(loss_n=self.loss_n * weight_n.to(self.loss_n.dtype), weight_n1=both_n1)


class ChunkSoftmax(ABC):
    """Computes the scores of a chunk of outputs, and their sums. Collective over the ranks that share candidates."""

    chunk: int
    """Largest number of outputs at a time."""

    gradient_dtype: torch.dtype
    """Of the outputs' gradient, which is summed up over ranks."""

    def __init__(self, outputs_ND: Tensor, rows_wD: Tensor, candidates: Candidates, score: Score, group: Group) -> None:
        self._rows_wD, self._score, self._group, self._numerator = rows_wD, score, group, candidates.numerator

    @abstractmethod
    def sums(self, outputs_nD: Tensor, target_n: Tensor) -> RowSums:
        """target_n: indices into this rank's candidates; outside of them for targets on other ranks."""

    @abstractmethod
    def residuals(self, outputs_nD: Tensor, target_n: Tensor) -> Residuals:
        """As `sums`."""

    def product_(self, result: Tensor, left: Tensor, right: Tensor) -> None:
        """result = left @ right."""
        torch.mm(left, right, out=result)

    @abstractmethod
    def add_product_(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        """total += left @ right, accumulated in the type of `total`."""


class TorchChunkSoftmax(ChunkSoftmax):
    """With torch's operations: exponentials overwrite the scores. Two small all-reduces per chunk."""

    def __init__(self, outputs_ND: Tensor, rows_wD: Tensor, candidates: Candidates, score: Score, group: Group) -> None:
        super().__init__(outputs_ND, rows_wD, candidates, score, group)
        width, dtype = rows_wD.shape[0], torch.promote_types(rows_wD.dtype, torch.float32)
        bias_w, target_bias_w = candidates.bias_U, candidates.target_bias_U
        self._bias_w = rows_wD.new_zeros(width, dtype=dtype) if bias_w is None else bias_w.detach().to(dtype)
        self._target_bias_w = None if target_bias_w is None else target_bias_w.to(dtype)
        self.chunk = CPU_CHUNKS.outputs(outputs_ND.shape[0], width, dtype.itemsize)
        self._buffer, self.gradient_dtype = rows_wD.new_empty(self.chunk, width, dtype=dtype), dtype

    def sums(self, outputs_nD: Tensor, target_n: Tensor) -> RowSums:
        scored = self._scored(outputs_nD, target_n)
        scores_nw, held_n1 = scored.scores_nw, scored.held_n1
        lse_n = self._group.all_gather(scores_nw.logsumexp(dim=1)).logsumexp(dim=0)
        target_n, biased_n = self._group.all_reduce_(scored.of_targets_n2).unbind(dim=1)
        own_n1 = scores_nw.gather(1, scored.index_n1)
        scores_nw.scatter_(1, scored.index_n1, own_n1.masked_fill(held_n1, -torch.inf))
        return RowSums(lse_n, target_n, biased_n, self._group.all_reduce_max_(scores_nw.amax(dim=1)))

    def residuals(self, outputs_nD: Tensor, target_n: Tensor) -> Residuals:
        scores_nw, index_n1, held_n1, of_targets_n2, derivatives_nw = self._scored(outputs_nD, target_n)
        top_n1 = self._group.all_reduce_max_(scores_nw.amax(dim=1, keepdim=True))
        scores_nw.sub_(top_n1).clamp_min_(LEAST_SHIFTED_SCORE).exp_()
        sums_n3 = torch.cat([scores_nw.sum(dim=1, keepdim=True), of_targets_n2], dim=1)
        total_n1, *own_n2 = self._group.all_reduce_(sums_n3).split(1, dim=1)
        scores_nw.scatter_add_(1, index_n1, -total_n1 * held_n1)
        loss_n1 = top_n1 + total_n1.log() - self._numerator(*own_n2)
        return Residuals(loss_n1.squeeze(1), scores_nw, 1 / total_n1, derivatives_nw)

    def draws(self, outputs_nD: Tensor, target_n: Tensor, uniform_n: Tensor) -> Tensor:
        """int64 [n]: of each output the place of a candidate drawn from its softmax, or -1 where that is another
        rank's. `uniform_n`: float64 in (0, 1); the candidates' probabilities lie end to end, in the order of places and
        ranks, and what lies there is drawn. Where no candidate has a weight it is the target."""
        scored = self._scored(outputs_nD, target_n)
        scores_nw, index_n, held_n = scored.scores_nw, scored.index_n1.squeeze(1), scored.held_n1.squeeze(1)
        top_n1 = self._group.all_reduce_max_(scores_nw.amax(dim=1, keepdim=True))
        scores_nw.sub_(top_n1).clamp_min_(LEAST_SHIFTED_SCORE).exp_()
        below_nk = _block_sums(scores_nw).cumsum(dim=1)
        below_Rn = self._group.all_gather(below_nk[:, -1].contiguous()).cumsum(dim=0)
        point_n, rank = uniform_n * below_Rn[-1], self._group.rank
        mine_n = (below_Rn[:-1] <= point_n).sum(dim=0) == rank
        place_n = _place_of(scores_nw, below_nk, point_n - below_Rn[rank - 1] if rank else point_n)
        none_n = below_Rn[-1].isnan()  # -inf less -inf is no number
        place_n, mine_n = torch.where(none_n, index_n, place_n), torch.where(none_n, held_n, mine_n)
        return torch.where(mine_n, place_n, -1)

    def add_product_(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        total.addmm_(left, right)

    def _scored(self, outputs_nD: Tensor, target_n: Tensor) -> _Scored:
        scores_nw, width = self._buffer[: len(outputs_nD)], self._buffer.shape[1]
        derivatives_nw = self._biased_(scores_nw, outputs_nD)
        held_n1 = ((target_n >= 0) & (target_n < width))[:, None]
        index_n = target_n.clamp(0, width - 1)
        biased_n1 = scores_nw.gather(1, index_n[:, None])
        if self._target_bias_w is None:
            target_n1 = biased_n1 - self._bias_w[index_n, None]
        else:
            target_n1 = (outputs_nD * self._rows_wD[index_n]).sum(dim=1, keepdim=True, dtype=scores_nw.dtype)
            self._score.similarity_(target_n1)
            target_n1 *= self._score.scale
            biased_n1 = biased_n1.where(~held_n1, target_n1 + self._target_bias_w[index_n, None])
            scores_nw.scatter_(1, index_n[:, None], biased_n1)
        of_targets_n2 = torch.cat([target_n1, biased_n1], dim=1).where(held_n1, 0.0)
        return _Scored(scores_nw, index_n[:, None], held_n1, of_targets_n2, derivatives_nw)

    def _biased_(self, scores_nw: Tensor, outputs_nD: Tensor) -> Tensor | None:
        """Fills in scores with biases; returns the derivatives of the similarities."""
        if self._score.is_product:
            torch.addmm(self._bias_w, outputs_nD, self._rows_wD.T, alpha=self._score.scale, out=scores_nw)
            return None
        derivatives_nw = self._score.similarity_(torch.mm(outputs_nD, self._rows_wD.T, out=scores_nw))
        scores_nw.mul_(self._score.scale).add_(self._bias_w)
        return derivatives_nw


_BLOCK = 512


def _block_sums(weights_nw: Tensor) -> Tensor:
    """float64 [n, k]: the sums of blocks of _BLOCK weights, the last of which may have fewer (or none)."""
    whole = weights_nw.shape[1] // _BLOCK
    sums_nk = weights_nw[:, : whole * _BLOCK].unflatten(1, (whole, _BLOCK)).sum(dim=2)
    rest_n1 = weights_nw[:, whole * _BLOCK :].sum(dim=1, keepdim=True)
    return torch.cat([sums_nk, rest_n1], dim=1).double()


def _place_of(weights_nw: Tensor, below_nk: Tensor, point_n: Tensor) -> Tensor:
    """int64 [n]: where the running sum of weights passes `point_n`. `below_nk`: the running sums of blocks, by which
    only the weights of one block are added up: in float64 all would take longer than their product."""
    point_n1, last = point_n[:, None], weights_nw.shape[1] - 1
    block_n1 = torch.searchsorted(below_nk, point_n1, right=True).clamp_max(below_nk.shape[1] - 1)
    end_n1 = below_nk.gather(1, block_n1)
    start_n1 = below_nk.gather(1, (block_n1 - 1).clamp_min(0)).where(block_n1 > 0, 0.0)
    index_nb = block_n1 * _BLOCK + torch.arange(_BLOCK, device=weights_nw.device)
    inside_nb = weights_nw.gather(1, index_nb.clamp_max(last)).where(index_nb <= last, 0.0)
    inside_nb = inside_nb.cumsum(dim=1, dtype=torch.float64)
    share_n1 = (point_n1 - start_n1) / (end_n1 - start_n1)  # of the block, whose sum was rounded
    place_n1 = torch.searchsorted(inside_nb, share_n1 * inside_nb[:, -1:], right=True)
    return (block_n1 * _BLOCK + place_n1).squeeze(1).clamp(0, last)


class _Scored(NamedTuple):
    """A chunk's scores with biases, and the indices of the targets in them."""

    scores_nw: Tensor
    index_n1: Tensor
    held_n1: Tensor
    """bool: whether this rank holds the target; if not, `index_n1` points anywhere."""
    of_targets_n2: Tensor
    """Scores of targets without and with their biases; 0 for those of other ranks."""
    derivatives_nw: Tensor | None
    """As in `Residuals`."""


# Products in bf16, for CPUs with units for them. torch rounds them to bf16, so scores are, as those of a bf16 head in
# Megatron or under autocast. Their softmax, the loss and the sums of gradients are in float32; residuals are rounded
# once more for the products that read them, as on GPUs.


class HalfChunkSoftmax(TorchChunkSoftmax):
    """A `ChunkSoftmax` on bf16 inputs, for losses under scores that are products."""

    def __init__(self, outputs_ND: Tensor, rows_wD: Tensor, candidates: Candidates, score: Score, group: Group) -> None:
        super().__init__(outputs_ND, rows_wD, candidates, score, group)
        self._half = rows_wD.new_empty(self._buffer.shape)
        """A chunk's scores and, once these are copied, its residuals."""

    def residuals(self, outputs_nD: Tensor, target_n: Tensor) -> Residuals:
        found = super().residuals(outputs_nD, target_n)
        return found._replace(matrix_nw=self._half[: len(outputs_nD)].copy_(found.matrix_nw))

    def product_(self, result: Tensor, left: Tensor, right: Tensor) -> None:
        result.copy_(torch.mm(left, right))

    def add_product_(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        total.add_(torch.mm(left.to(self._half.dtype), right.to(self._half.dtype)))

    def _biased_(self, scores_nw: Tensor, outputs_nD: Tensor) -> None:
        rounded_nw = torch.mm(outputs_nD, self._rows_wD.T, out=self._half[: len(outputs_nD)])
        scores_nw.copy_(rounded_nw).mul_(self._score.scale).add_(self._bias_w)


# The loss, and what evaluation and drawing need, over all chunks.


def fused_softmax_loss(
    outputs_ND: Tensor, rows_wD: Tensor, candidates: Candidates, score: Score, group: Group
) -> Tensor:
    """`candidate_loss` for N > 0, over all ranks' candidates, on every rank of `group`.

    outputs_ND, rows_wD: what `score` has made of them.

    `candidates`: this rank's biases [w] (-inf: padding), and targets as indices into them (outside: another rank's).
    The outputs' gradient is summed over the ranks already. Both gradients, N x D in the inputs' type (on CPUs float32)
    and w x D in float32, are all that is kept for the backward pass. Collective.
    """
    dtype, bias_w = loss_dtype(outputs_ND, rows_wD, score), candidates.bias_U
    if bias_w is not None and bias_w.requires_grad and not candidates.subtracts_target_bias:
        raise ValueError("a bias with a gradient must be in the numerator, too (subtracts_target_bias)")
    inputs = outputs_ND.to(dtype), rows_wD.to(dtype), bias_w
    loss: Tensor = _FusedSoftmax.apply(*inputs, candidates, score, group)
    return loss


def softmax_sums(outputs_ND: Tensor, rows_wD: Tensor, candidates: Candidates, score: Score, group: Group) -> RowSums:
    """The `RowSums` of all outputs, without gradients; arguments as of `fused_softmax_loss`. Collective."""
    if outputs_ND.shape[0] == 0:
        return RowSums(*outputs_ND.new_zeros(4, 0))
    dtype = product_dtype(outputs_ND, rows_wD, score)
    outputs_ND = outputs_ND.to(dtype)
    step = chunk_softmax(outputs_ND, rows_wD.to(dtype), candidates, score, group)
    parts = [step.sums(outputs_ND[part], candidates.target_N[part]) for part in _chunks(step, outputs_ND)]
    return RowSums(*map(torch.cat, zip(*parts, strict=True)))


def softmax_draws(
    outputs_ND: Tensor, rows_wD: Tensor, candidates: Candidates, score: Score, group: Group, uniform_N: Tensor
) -> Tensor:
    """int64 [N]: places of candidates drawn by `TorchChunkSoftmax.draws`, on any device in float32 at least; -1 where
    that is another rank's. Arguments as of `fused_softmax_loss`. Collective."""
    if outputs_ND.shape[0] == 0:
        return torch.zeros(0, dtype=torch.int64, device=outputs_ND.device)
    dtype = torch.promote_types(torch.promote_types(outputs_ND.dtype, rows_wD.dtype), torch.float32)
    outputs_ND = outputs_ND.to(dtype)
    with torch.autocast(outputs_ND.device.type, enabled=False):
        step = TorchChunkSoftmax(outputs_ND, rows_wD.to(dtype), candidates, score, group)
        parts = _chunks(step, outputs_ND)
        drawn = [step.draws(outputs_ND[part], candidates.target_N[part], uniform_N[part]) for part in parts]
    return torch.cat(drawn)


def on_gpu(tensor: Tensor) -> bool:
    """Whether the kernel for GPUs can be used."""
    return tensor.is_cuda and tensor.dtype != torch.float64


def takes_kernel(outputs_ND: Tensor, score: Score) -> bool:
    """Whether the kernel for GPUs serves these outputs: not under a score that is no product, which takes torch's
    operations in float32 on every device."""
    return on_gpu(outputs_ND) and score.is_product


def loss_dtype(outputs_ND: Tensor, rows_wD: Tensor, score: Score) -> torch.dtype:
    """The type that a loss's products read: `product_dtype`, but bf16 on CPUs that multiply it fast, where a GPU would
    take it."""
    wanted = _given_dtype(outputs_ND, rows_wD)
    fast = outputs_ND.device.type == "cpu" and wanted == torch.bfloat16 and has_fast_bf16(outputs_ND.device)
    return wanted if fast and score.is_product else product_dtype(outputs_ND, rows_wD, score)


def product_dtype(outputs_ND: Tensor, rows_wD: Tensor, score: Score) -> torch.dtype:
    """The type that products read: for the kernel the inputs', or autocast's, if that is half precision; else float32,
    or float64 if either input has it."""
    given = _given_dtype(outputs_ND, rows_wD)
    return given if takes_kernel(outputs_ND, score) else torch.promote_types(given, torch.float32)


def _given_dtype(outputs_ND: Tensor, rows_wD: Tensor) -> torch.dtype:
    """Autocast's type, or that of the inputs: half precision if both have it, else float32, or float64 if either has
    it."""
    both = torch.promote_types(outputs_ND.dtype, rows_wD.dtype)
    if both.itemsize <= 4 and torch.is_autocast_enabled(outputs_ND.device.type):
        return torch.get_autocast_dtype(outputs_ND.device.type)
    return both if both.itemsize == 2 else torch.promote_types(both, torch.float32)


def chunk_softmax(
    outputs_ND: Tensor, rows_wD: Tensor, candidates: Candidates, score: Score, group: Group
) -> ChunkSoftmax:
    """The implementation for the inputs' device, prepared for chunks of these outputs."""
    step: type[ChunkSoftmax] = HalfChunkSoftmax if rows_wD.dtype == torch.bfloat16 else TorchChunkSoftmax
    if takes_kernel(outputs_ND, score):  # triton comes with torch for CUDA alone
        step = importlib.import_module("megahead.losses.triton_kernel").TritonChunkSoftmax
    return step(outputs_ND, rows_wD, candidates, score, group)


def _chunks(step: ChunkSoftmax, outputs_ND: Tensor) -> Iterator[slice]:
    total = outputs_ND.shape[0]
    return (slice(start, min(start + step.chunk, total)) for start in range(0, total, step.chunk))


class _FusedSoftmax(torch.autograd.Function):
    """Computes gradients in the forward pass, while a chunk's scores are there, so that nothing is computed twice."""

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
        with torch.autocast(outputs_ND.device.type, enabled=False):
            step = chunk_softmax(outputs_ND, rows_wD, candidates, score, group)
            gradients = _Gradients(outputs_ND, rows_wD, step, bias_wanted=ctx.needs_input_grad[2])
            losses = []
            for part in _chunks(step, outputs_ND):
                residuals = step.residuals(outputs_ND[part], candidates.target_N[part])
                if candidates.weight_N is not None:
                    residuals = residuals.weighted(candidates.weight_N[part])
                losses.append(residuals.loss_n)
                if any(ctx.needs_input_grad):
                    gradients.add(part, residuals)
            group.all_reduce_(gradients.outputs)
        ctx.save_for_backward(gradients.outputs, gradients.rows, gradients.bias)
        ctx.scale, ctx.dtype = score.scale, outputs_ND.dtype
        return torch.cat(losses).sum()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad_outputs, grad_rows, grad_bias = ctx.saved_tensors
        slope = grad_loss * ctx.scale
        both = ((gradient * slope).to(ctx.dtype) for gradient in (grad_outputs, grad_rows))
        gradients = *both, None if grad_bias is None else grad_bias * grad_loss
        if torch.is_grad_enabled():  # create_graph=True
            zero = _Refused.apply(grad_loss.new_zeros((), requires_grad=True))
            gradients = tuple(None if each is None else each + zero.to(each.dtype) for each in gradients)
        return *gradients, None, None, None


class _Refused(torch.autograd.Function):
    """Zero, whose gradient is refused; gradients without it would pass for constants in outputs and rows. By the loss's
    factor they may be differentiated."""

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
    """The loss's gradients by outputs and rows (divided by the score's scale), and by biases, as chunks come in."""

    def __init__(self, outputs_ND: Tensor, rows_wD: Tensor, step: ChunkSoftmax, bias_wanted: bool) -> None:
        total_dtype = torch.promote_types(rows_wD.dtype, torch.float32)
        self._inputs, self._step = (outputs_ND, rows_wD), step
        self.outputs = torch.empty_like(outputs_ND, dtype=step.gradient_dtype)
        self.rows = torch.zeros_like(rows_wD, dtype=total_dtype)
        self.bias = rows_wD.new_zeros(len(rows_wD), dtype=total_dtype) if bias_wanted else None

    def add(self, part: slice, residuals: Residuals) -> None:
        """The gradients of the outputs of `part`, and what they add to those of rows and biases."""
        (outputs_ND, rows_wD), (_, matrix_nw, weight_n1, derivatives_nw) = self._inputs, residuals
        outputs_nD, gradient_nD = outputs_ND[part], self.outputs[part]
        if self.bias is not None:  # the loss subtracts the target's bias: its gradient has the same -1 as the scores'
            if weight_n1 is None:
                self.bias.add_(matrix_nw.sum(0, dtype=self.bias.dtype))
            else:
                self._step.add_product_(self.bias[None], weight_n1.T, matrix_nw)
        if derivatives_nw is not None:
            matrix_nw.mul_(derivatives_nw)
        self._step.product_(gradient_nD, matrix_nw, rows_wD)
        if weight_n1 is not None:
            gradient_nD.mul_(weight_n1)
            outputs_nD = outputs_nD * weight_n1
        self._step.add_product_(self.rows, matrix_nw.T, outputs_nD)
