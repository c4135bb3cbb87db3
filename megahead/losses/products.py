"""The softmax over candidates as three products, chunk by chunk, with candidates split over ranks or not."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from megahead.distributed.group import Group, multiplies_bf16_fast
from megahead.losses.candidates import Candidates
from megahead.losses.row_step import HalfRowStep, Residuals, RowStep, RowSums, TorchRowStep
from megahead.losses.scores import Score

# The softmax over candidates in three products of N x w x D, chunk by chunk of outputs: N x w scores are never held.
#
# One product gives a chunk's scores, a row step their residuals (on CPUs by torch's operations, `row_step`, in bf16
# `half_row_step`; on GPUs by a kernel, `row_kernel`), two products both gradients: in the forward pass, so that
# nothing is computed twice. Nothing waits for the device, and nothing is added atomically, not to a learned bias
# either: results do not vary.
#
# N outputs, D features, w candidates of this rank (all of them where there is one rank).


def three_product_loss(
    outputs_ND: Tensor, rows_wD: Tensor, candidates: Candidates, score: Score, group: Group
) -> Tensor:
    """`candidate_loss` for N > 0, over all ranks' candidates, on every rank of `group`.

    outputs_ND, rows_wD: what `score` has made of them.

    `candidates`: this rank's biases [w] (-inf: padding), and positives as indices into them (outside: another rank's).
    The outputs' gradient is summed over the ranks already. Both gradients, N x D in the inputs' type (on CPUs float32)
    and w x D in float32, are all that is kept for the backward pass. Collective.
    """
    dtype, bias_w = loss_dtype(outputs_ND, rows_wD, score), candidates.bias_U
    if bias_w is not None and bias_w.requires_grad and not candidates.subtracts_positive_bias:
        raise ValueError("a bias with a gradient must be in the numerator, too (subtracts_positive_bias)")
    inputs = outputs_ND.to(dtype), rows_wD.to(dtype), bias_w
    loss: Tensor = _ThreeProducts.apply(*inputs, candidates, score, group)
    return loss


def softmax_sums(outputs_ND: Tensor, rows_wD: Tensor, candidates: Candidates, score: Score, group: Group) -> RowSums:
    """The `RowSums` of N > 0 outputs, without gradients; arguments as of `three_product_loss`. Collective."""
    dtype = product_dtype(outputs_ND, rows_wD, score)
    outputs_ND = outputs_ND.to(dtype)
    step = row_step(outputs_ND, rows_wD.to(dtype), candidates, score, group)
    parts = [step.sums(outputs_ND[part], candidates.positive_N[part]) for part in _chunks(step, outputs_ND)]
    return RowSums(*map(torch.cat, zip(*parts, strict=True)))


def softmax_draws(
    outputs_ND: Tensor, rows_wD: Tensor, candidates: Candidates, score: Score, uniform_N: Tensor, group: Group
) -> Tensor:
    """int64 [N]: places of candidates drawn for N > 0 outputs by `TorchRowStep.draws`, on any device in float32 at
    least; arguments as of `three_product_loss`. Collective."""
    dtype = torch.promote_types(torch.promote_types(outputs_ND.dtype, rows_wD.dtype), torch.float32)
    outputs_ND = outputs_ND.to(dtype)
    with torch.autocast(outputs_ND.device.type, enabled=False):
        step = TorchRowStep(outputs_ND, rows_wD.to(dtype), candidates, score, group)
        parts = _chunks(step, outputs_ND)
        drawn = [step.draws(outputs_ND[part], candidates.positive_N[part], uniform_N[part]) for part in parts]
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
    fast = outputs_ND.device.type == "cpu" and wanted == torch.bfloat16 and multiplies_bf16_fast(outputs_ND.device)
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


def row_step(outputs_ND: Tensor, rows_wD: Tensor, candidates: Candidates, score: Score, group: Group) -> RowStep:
    """The row step for the inputs' device, prepared for chunks of these outputs."""
    if not takes_kernel(outputs_ND, score):
        step = HalfRowStep if rows_wD.dtype == torch.bfloat16 else TorchRowStep
        return step(outputs_ND, rows_wD, candidates, score, group)
    kernel = importlib.import_module("megahead.losses.triton_kernel")  # triton comes with torch for CUDA alone
    return cast(RowStep, kernel.KernelRowStep(outputs_ND, rows_wD, candidates, score, group))


def _chunks(step: RowStep, outputs_ND: Tensor) -> Iterator[slice]:
    total = outputs_ND.shape[0]
    return (slice(start, min(start + step.chunk, total)) for start in range(0, total, step.chunk))


class _ThreeProducts(torch.autograd.Function):
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
            step = row_step(outputs_ND, rows_wD, candidates, score, group)
            gradients = _Gradients(outputs_ND, rows_wD, step, bias_wanted=ctx.needs_input_grad[2])
            losses = []
            for part in _chunks(step, outputs_ND):
                residuals = step.residuals(outputs_ND[part], candidates.positive_N[part])
                if candidates.weight_N is not None:
                    residuals = residuals.weighed(candidates.weight_N[part])
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
            "the softmax over candidates must be differentiated once, but a second derivative was asked for; compute "
            "the loss by `candidate_loss_reference`, or without create_graph."
        )


class _Gradients:
    """The loss's gradients by outputs and rows (divided by the score's scale), and by biases, as chunks come in."""

    def __init__(self, outputs_ND: Tensor, rows_wD: Tensor, step: RowStep, bias_wanted: bool) -> None:
        total_dtype = torch.promote_types(rows_wD.dtype, torch.float32)
        self._inputs, self._step = (outputs_ND, rows_wD), step
        self.outputs = torch.empty_like(outputs_ND, dtype=step.gradient_dtype)
        self.rows = torch.zeros_like(rows_wD, dtype=total_dtype)
        self.bias = rows_wD.new_zeros(len(rows_wD), dtype=total_dtype) if bias_wanted else None

    def add(self, part: slice, residuals: Residuals) -> None:
        """The gradients of the outputs of `part`, and what they add to those of rows and biases."""
        (outputs_ND, rows_wD), (_, matrix_nw, weight_n1, slopes_nw) = self._inputs, residuals
        outputs_nD, gradient_nD = outputs_ND[part], self.outputs[part]
        if self.bias is not None:
            self._add_to_bias(self.bias, residuals)
        if slopes_nw is not None:
            matrix_nw.mul_(slopes_nw)
        self._step.product_(gradient_nD, matrix_nw, rows_wD)
        if weight_n1 is not None:
            gradient_nD.mul_(weight_n1)
            outputs_nD = outputs_nD * weight_n1
        self._step.add_product_(self.rows, matrix_nw.T, outputs_nD)

    def _add_to_bias(self, bias_w: Tensor, residuals: Residuals) -> None:
        """Adds residuals: the loss subtracts the positive's bias, so that its gradient has the same -1 as that of the
        scores."""
        _, matrix_nw, weight_n1, _ = residuals
        if weight_n1 is None:
            bias_w.add_(matrix_nw.sum(0, dtype=bias_w.dtype))
        else:
            self._step.add_product_(bias_w[None], weight_n1.T, matrix_nw)


# An even split of the candidates over the ranks of a tensor group.
#
# U candidates of all ranks, w rows on each rank.


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
