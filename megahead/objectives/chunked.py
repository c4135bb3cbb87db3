"""The softmax over candidates, a chunk of outputs at a time: N x U scores are never held.

N outputs, D features, U candidates; lower-case n: the outputs of one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megahead.config.loss_chunks import CHUNK_BYTES, MIN_CHUNK_OUTPUTS
from megahead.objectives.candidates import Candidates

MIN_SHIFTED_SCORE = -60.0
"""Scores, after the largest was subtracted, are at least this: e^-60 is lost in rounding anyway, while the denormal
numbers around e^-90 make the products that follow 13 times slower on a CPU (measured, one core, 512 x 16,384)."""


def chunked_candidate_loss(outputs_ND: Tensor, rows_UD: Tensor, candidates: Candidates, temperature: float) -> Tensor:
    """`candidate_loss` for N > 0, without its constant.

    Cost: three N x U x D products. Both gradients are computed in the forward pass, chunk by chunk, and only these
    (N x D and U x D) are kept for the backward pass.
    """
    loss: Tensor = _ChunkedLoss.apply(outputs_ND, rows_UD, candidates.bias_U, candidates, temperature)
    return loss


def promoted(outputs_ND: Tensor, rows_UD: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the type the scores are computed in: float32, or float64 if either is."""
    dtype = torch.promote_types(torch.promote_types(outputs_ND.dtype, rows_UD.dtype), torch.float32)
    return outputs_ND.to(dtype), rows_UD.to(dtype)


class Chunk(NamedTuple):
    """Some outputs, scored against all candidates."""

    outputs: slice
    scores_nU: Tensor
    """With biases; the buffer may be overwritten."""
    positive_n1: Tensor
    """Place of the positive among the candidates."""
    positive_scores_n1: Tensor
    """Score of the positive without its bias."""


def score_chunks(outputs_ND: Tensor, rows_UD: Tensor, candidates: Candidates, temperature: float) -> Iterator[Chunk]:
    """Chunk by chunk, at most CHUNK_BYTES of scores each (more for MIN_CHUNK_OUTPUTS outputs)."""
    total, width = outputs_ND.shape[0], rows_UD.shape[0]
    bias = None if candidates.bias_U is None else candidates.bias_U.to(outputs_ND.dtype)
    addend = outputs_ND.new_zeros(1) if bias is None else bias
    positive_bias_U = candidates.positive_bias_U
    step = max(1, min(total, max(MIN_CHUNK_OUTPUTS, CHUNK_BYTES // (width * outputs_ND.element_size()))))
    buffer = outputs_ND.new_empty(step, width)
    for start in range(0, total, step):
        chunk = slice(start, min(start + step, total))
        scores_nU, positive_n1 = buffer[: chunk.stop - start], candidates.positive_N[chunk, None]
        torch.addmm(addend, outputs_ND[chunk], rows_UD.T, alpha=1 / temperature, out=scores_nU)
        if positive_bias_U is None:
            positive_scores_n1 = scores_nU.gather(1, positive_n1)
            positive_scores_n1 = positive_scores_n1 if bias is None else positive_scores_n1 - bias[positive_n1]
        else:
            positive_scores_n1 = (outputs_ND[chunk] * rows_UD[positive_n1[:, 0]]).sum(1, keepdim=True) / temperature
            scores_nU.scatter_(1, positive_n1, positive_scores_n1 + positive_bias_U.to(scores_nU.dtype)[positive_n1])
        yield Chunk(chunk, scores_nU, positive_n1, positive_scores_n1)


class _ChunkedLoss(torch.autograd.Function):
    """Computes the gradients while the scores of a chunk are at hand, so that backward need not compute them again."""

    @staticmethod
    def forward(
        ctx: Any,
        outputs_ND: Tensor,
        rows_UD: Tensor,
        bias_U: Tensor | None,
        candidates: Candidates,
        temperature: float,
    ) -> Tensor:
        with torch.autocast(outputs_ND.device.type, enabled=False):
            outputs, rows = promoted(outputs_ND, rows_UD)
            wanted = any(ctx.needs_input_grad[:3])
            grad_outputs = torch.empty_like(outputs) if wanted else None
            grad_rows = torch.zeros_like(rows) if wanted else None
            grad_bias = rows.new_zeros(len(rows)) if ctx.needs_input_grad[2] else None
            loss = outputs.new_zeros(())
            for chunk, scores_nU, positive_n1, positive_scores_n1 in score_chunks(
                outputs, rows, candidates, temperature
            ):
                top_n1, total_n1 = _exponentials_(scores_nU)
                loss += (top_n1 + total_n1.log() - positive_scores_n1).sum()
                if grad_bias is not None:
                    grad_bias.addmv_(scores_nU.T, 1 / total_n1.squeeze(1))
                if grad_outputs is not None and grad_rows is not None:
                    scores_nU.scatter_add_(1, positive_n1, -total_n1)  # total * (probability - 1 at the positive)
                    torch.mm(scores_nU, rows, out=grad_outputs[chunk]).div_(total_n1)
                    grad_rows.addmm_(scores_nU.T, outputs[chunk] / total_n1)
        if grad_outputs is not None and grad_rows is not None:
            ctx.save_for_backward(grad_outputs.div_(temperature), grad_rows.div_(temperature), grad_bias)
            ctx.dtypes = outputs_ND.dtype, rows_UD.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad_outputs, grad_rows, grad_bias = ctx.saved_tensors
        outputs_dtype, rows_dtype = ctx.dtypes
        both = (grad_outputs * grad_loss).to(outputs_dtype), (grad_rows * grad_loss).to(rows_dtype)
        return *both, None if grad_bias is None else grad_bias * grad_loss, None, None


def _exponentials_(scores_nU: Tensor) -> tuple[Tensor, Tensor]:
    """Turns scores into exp(score - largest) in place; returns (largest, sum of exponentials), both [n, 1]."""
    top_n1 = scores_nU.amax(dim=1, keepdim=True)
    scores_nU.sub_(top_n1).clamp_min_(MIN_SHIFTED_SCORE).exp_()
    return top_n1, scores_nU.sum(dim=1, keepdim=True)
