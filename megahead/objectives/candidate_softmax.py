"""The softmax over candidates: an obvious reference, and a chunked twin that never holds N x U scores.

Shapes: N outputs, D features, U candidates; lower-case n: the outputs of one chunk.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK_BYTES = 8 * 2**20
"""Scores held at once: small beside the gradients, large enough that each chunk's products run at full speed (measured
on one core, 16,384 x 4,300 x 512: the same from 2 to 32 MiB, and no slower than the three products alone)."""

LEAST_ROWS = 256
"""Outputs of a chunk, however many candidates there are: each chunk adds to the gradient of all rows (measured with
50,304 candidates: 256 outputs are 1.7 times as fast as 41)."""

LOWEST = -60.0
"""Scores further below the largest count as this: e^-60 is lost in rounding anyway, while the denormal numbers
that e^-90 leaves behind make the products after it 13 times slower on a CPU (measured, one core, 512 x 16,384)."""


def candidate_loss_reference(
    outputs_ND: Tensor,
    rows_UD: Tensor,
    positive_N: Tensor,
    bias_U: Tensor | None = None,
    temperature: float = 1.0,
    positive_bias_U: Tensor | None = None,
) -> Tensor:
    """`sum_i [ log( exp(s_own + b'_own) + sum_{u != own} exp(s_u + b_u) ) - s_own ]` as it is written down, with
    s_u = h_i.e_u / T; b' = b unless given. Holds N x U scores."""
    scores_NU = outputs_ND @ rows_UD.T / temperature
    positive_scores_N1 = scores_NU.gather(1, positive_N[:, None])
    biased_NU = scores_NU if bias_U is None else scores_NU + bias_U
    if positive_bias_U is not None:
        biased_NU = biased_NU.scatter(1, positive_N[:, None], positive_scores_N1 + positive_bias_U[positive_N, None])
    return (biased_NU.logsumexp(dim=1) - positive_scores_N1.squeeze(1)).sum()


def candidate_loss(
    outputs_ND: Tensor,
    rows_UD: Tensor,
    positive_N: Tensor,
    bias_U: Tensor | None = None,
    temperature: float = 1.0,
    positive_bias_U: Tensor | None = None,
) -> Tensor:
    """`sum_i [ log( exp(s_own + b'_own) + sum_{u != own} exp(s_u + b_u) ) - s_own ]`, a scalar, in bounded memory.

    s_u = h_i.e_u / T; own(i) is `positive_N[i]`, int64 in [0, U). outputs_ND, rows_UD: any float type; computed in float32
    (float64 for float64 inputs), largest score subtracted, so that scores of +-1e4 stay finite. bias_U: b, may hold
    -inf for rows that no output owns, and gets a gradient if it asks for one. positive_bias_U: b', where own tokens have
    another bias; then b may be -inf anywhere. N = 0 gives 0, connected to its inputs.

    Cost: three N x U x D products; both gradients are computed in the forward pass, chunk by chunk,
    and only these (N x D and U x D) are kept for the backward pass. On CUDA in half precision (or autocast to it) the
    kernels of `fused` do the same without writing scores to memory.
    """
    if outputs_ND.shape[0] == 0:
        return 0.0 * (outputs_ND.float().sum() + rows_UD.float().sum())
    loss: Tensor
    half = _fused_type(outputs_ND, rows_UD)
    if half is not None:
        fused = importlib.import_module("megahead.objectives.fused")  # triton comes with torch for CUDA alone
        halves = outputs_ND.to(half), rows_UD.to(half)
        if bias_U is not None and bias_U.requires_grad:
            features = _bias_as_features(*halves, bias_U * temperature)
            loss = fused.fused_candidate_loss(*features, positive_N, None, temperature)
            return loss + bias_U.index_select(0, positive_N).sum(dtype=loss.dtype)  # which own scores now contain
        loss = fused.fused_candidate_loss(*halves, positive_N, bias_U, temperature, positive_bias_U)
        return loss
    loss = _CandidateLoss.apply(outputs_ND, rows_UD, positive_N, bias_U, temperature, positive_bias_U)
    return loss


def _bias_as_features(outputs_ND: Tensor, rows_UD: Tensor, bias_U: Tensor) -> tuple[Tensor, Tensor]:
    """The same scores with the bias as one more feature, 1 in every output, for kernels that have no gradient of it.

    Eight more features, of which seven are 0, keep rows aligned.
    """
    ones = F.pad(outputs_ND.new_ones(len(outputs_ND), 1), (0, 7))
    column = F.pad(bias_U[:, None].to(rows_UD.dtype), (0, 7))
    return torch.cat([outputs_ND, ones], 1), torch.cat([rows_UD, column], 1)


def _fused_type(outputs_ND: Tensor, rows_UD: Tensor) -> torch.dtype | None:
    """The half-precision type that the kernels would multiply in; None where they do not serve."""
    if outputs_ND.device.type != "cuda":
        return None
    if torch.is_autocast_enabled("cuda"):
        return torch.get_autocast_dtype("cuda")
    half = outputs_ND.dtype in (torch.bfloat16, torch.float16) and outputs_ND.dtype == rows_UD.dtype
    return outputs_ND.dtype if half else None


@dataclass(frozen=True)
class Scores:
    """How well outputs predict their targets, summed over N of them."""

    loss: float
    """Negative log-probability in nats."""

    correct: int
    """Targets that had the highest probability."""

    targets: int
    """N."""


@torch.no_grad()
def candidate_scores(
    outputs_ND: Tensor, rows_UD: Tensor, positive_N: Tensor, bias_U: Tensor | None = None, temperature: float = 1.0
) -> Scores:
    """Scores of the distribution `softmax_u(h_i.e_u / T + b_u)`; unlike the loss, the own bias counts."""
    loss, correct = 0.0, 0
    for chunk, scores_nU in _score_chunks(*promoted(outputs_ND, rows_UD), bias_U, temperature):
        positive_n = positive_N[chunk]
        positive_scores_n = scores_nU.gather(1, positive_n[:, None]).squeeze(1)
        loss += float((scores_nU.logsumexp(dim=1) - positive_scores_n).double().sum())
        correct += int((scores_nU.argmax(dim=1) == positive_n).sum())
    return Scores(loss, correct, positive_N.numel())


def promoted(outputs_ND: Tensor, rows_UD: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the type the scores are computed in: float32, or float64 if either is."""
    dtype = torch.promote_types(torch.promote_types(outputs_ND.dtype, rows_UD.dtype), torch.float32)
    return outputs_ND.to(dtype), rows_UD.to(dtype)


def _score_chunks(
    outputs_ND: Tensor, rows_UD: Tensor, bias_U: Tensor | None, temperature: float
) -> Iterator[tuple[slice, Tensor]]:
    """(which outputs, their biased scores [n, U]) chunk by chunk; the buffer may be overwritten."""
    total, candidates = outputs_ND.shape[0], rows_UD.shape[0]
    bias = outputs_ND.new_zeros(1) if bias_U is None else bias_U.to(outputs_ND.dtype)
    rows = max(LEAST_ROWS, CHUNK_BYTES // (candidates * outputs_ND.element_size()))
    step = max(1, min(total, rows))
    buffer = outputs_ND.new_empty(step, candidates)
    for start in range(0, total, step):
        chunk = slice(start, min(start + step, total))
        scores_nU = buffer[: chunk.stop - start]
        torch.addmm(bias, outputs_ND[chunk], rows_UD.T, alpha=1 / temperature, out=scores_nU)
        yield chunk, scores_nU


class _CandidateLoss(torch.autograd.Function):
    """Computes both gradients while the scores of a chunk are at hand: no second look at them in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        outputs_ND: Tensor,
        rows_UD: Tensor,
        positive_N: Tensor,
        bias_U: Tensor | None,
        temperature: float,
        positive_bias_U: Tensor | None,
    ) -> Tensor:
        with torch.autocast(outputs_ND.device.type, enabled=False):
            outputs, rows = promoted(outputs_ND, rows_UD)
            own = _Positives(rows, positive_N, bias_U, positive_bias_U, temperature)
            wanted = any(ctx.needs_input_grad[:4])
            grad_outputs = torch.empty_like(outputs) if wanted else None
            grad_rows = torch.zeros_like(rows) if wanted else None
            grad_bias = rows.new_zeros(len(rows)) if ctx.needs_input_grad[3] else None
            loss = outputs.new_zeros(())
            for chunk, scores_nU in _score_chunks(outputs, rows, bias_U, temperature):
                positive_n1, positive_scores_n1 = own.place(chunk, scores_nU, outputs[chunk])
                top_n1, total_n1 = _exponentials_(scores_nU)
                loss += (top_n1 + total_n1.log() - positive_scores_n1).sum()
                if grad_bias is not None:
                    grad_bias.addmv_(scores_nU.T, 1 / total_n1.squeeze(1))
                if grad_outputs is not None and grad_rows is not None:
                    scores_nU.scatter_add_(1, positive_n1, -total_n1)  # total * (probability - 1 where own)
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
        return *both, None, None if grad_bias is None else grad_bias * grad_loss, None, None


@dataclass(frozen=True)
class _Positives:
    """Own tokens among the candidates."""

    rows_UD: Tensor
    positive_N: Tensor
    bias_U: Tensor | None
    positive_bias_U: Tensor | None
    temperature: float

    def place(self, chunk: slice, scores_nU: Tensor, outputs_nD: Tensor) -> tuple[Tensor, Tensor]:
        """(own places, own unbiased scores), both [n, 1], of a chunk; `scores_nU` gets the own biases in place."""
        positive_n1, dtype = self.positive_N[chunk, None], scores_nU.dtype
        if self.positive_bias_U is None:
            positive_scores_n1 = scores_nU.gather(1, positive_n1)
            return positive_n1, positive_scores_n1 if self.bias_U is None else positive_scores_n1 - self.bias_U.to(
                dtype
            )[positive_n1]
        positive_scores_n1 = (outputs_nD * self.rows_UD[positive_n1.squeeze(1)]).sum(1, keepdim=True) / self.temperature
        scores_nU.scatter_(1, positive_n1, positive_scores_n1 + self.positive_bias_U.to(dtype)[positive_n1])
        return positive_n1, positive_scores_n1


def _exponentials_(scores_nU: Tensor) -> tuple[Tensor, Tensor]:
    """Turns scores into exp(score - largest) in place; returns (largest, sum of exponentials), both [n, 1]."""
    top_n1 = scores_nU.amax(dim=1, keepdim=True)
    scores_nU.sub_(top_n1).clamp_min_(LOWEST).exp_()
    return top_n1, scores_nU.sum(dim=1, keepdim=True)
