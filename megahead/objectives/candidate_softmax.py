"""The softmax over candidates: a plain reference, the loss that picks the fastest way, and sums for evaluation.

Every way to compute the loss has the signature of `candidate_loss`: `chunked` holds a few outputs' scores at a time,
`fused` none at all, `parallel.candidate_softmax` splits the candidates over ranks.

N outputs, D features, U candidates.
"""

from __future__ import annotations

import importlib
from typing import NamedTuple

import torch
from torch import Tensor

from megahead.objectives.candidates import Candidates
from megahead.objectives.chunked import chunked_candidate_loss, promoted, score_chunks


def candidate_loss_reference(
    outputs_ND: Tensor, rows_UD: Tensor, candidates: Candidates, temperature: float = 1.0
) -> Tensor:
    """`sum_i [ log( exp(s_p + b'_p) + sum_{u != p} exp(s_u + b_u) ) - s_p ] + constant`, written out.

    p is the positive of output i, s_u = h_i.e_u / T, T the temperature; b is `bias_U`, b' is `positive_bias_U`, or b if
    that is None. Holds N x U scores.
    """
    positive_N1 = candidates.positive_N[:, None]
    scores_NU = outputs_ND @ rows_UD.T / temperature
    positive_scores_N1 = scores_NU.gather(1, positive_N1)
    biased_NU = scores_NU if candidates.bias_U is None else scores_NU + candidates.bias_U
    if candidates.positive_bias_U is not None:
        biased_NU = biased_NU.scatter(1, positive_N1, positive_scores_N1 + candidates.positive_bias_U[positive_N1])
    return (biased_NU.logsumexp(dim=1) - positive_scores_N1.squeeze(1)).sum() + candidates.constant


def candidate_loss(outputs_ND: Tensor, rows_UD: Tensor, candidates: Candidates, temperature: float = 1.0) -> Tensor:
    """What `candidate_loss_reference` gives, a scalar, in bounded memory.

    outputs_ND, rows_UD: any float type; computed in float32 (float64 for float64 inputs), largest score subtracted,
    so that scores of +-1e4 stay finite. rows_UD: the rows of `candidates`, in their order. N = 0 gives the constant
    alone, connected to its inputs.

    On CUDA in half precision (or autocast to it) by the kernels of `fused`, else chunk by chunk (`chunked`).
    """
    if outputs_ND.shape[0] == 0:
        return 0.0 * (outputs_ND.float().sum() + rows_UD.float().sum()) + candidates.constant
    half = _half_type(outputs_ND, rows_UD)
    if half is None:
        return chunked_candidate_loss(outputs_ND, rows_UD, candidates, temperature) + candidates.constant
    fused = importlib.import_module("megahead.objectives.fused")  # triton comes with torch for CUDA alone
    loss: Tensor = fused.fused_candidate_loss(outputs_ND.to(half), rows_UD.to(half), candidates, temperature)
    return loss + candidates.constant


def _half_type(outputs_ND: Tensor, rows_UD: Tensor) -> torch.dtype | None:
    """The half-precision type for the CUDA kernels; None where they are not used."""
    if outputs_ND.device.type != "cuda":
        return None
    if torch.is_autocast_enabled("cuda"):
        return torch.get_autocast_dtype("cuda")
    half = outputs_ND.dtype in (torch.bfloat16, torch.float16) and outputs_ND.dtype == rows_UD.dtype
    return outputs_ND.dtype if half else None


class EvaluationSums(NamedTuple):
    """How well outputs predict their targets, summed over N of them. A tuple, because ZeRO-3 looks into outputs."""

    loss: float
    """Negative log-probability in nats."""

    correct: int
    """Targets that had the highest probability."""

    targets: int
    """N."""


@torch.no_grad()
def evaluation_sums(
    outputs_ND: Tensor, rows_UD: Tensor, candidates: Candidates, temperature: float = 1.0
) -> EvaluationSums:
    """For the distribution `softmax_u(h_i.e_u / T + b_u)`; unlike in the loss, the positive's score has its bias."""
    loss, correct = 0.0, 0
    for _, scores_nU, positive_n1, _ in score_chunks(*promoted(outputs_ND, rows_UD), candidates, temperature):
        loss += float((scores_nU.logsumexp(dim=1) - scores_nU.gather(1, positive_n1).squeeze(1)).double().sum())
        correct += int((scores_nU.argmax(dim=1) == positive_n1.squeeze(1)).sum())
    return EvaluationSums(loss, correct, candidates.positive_N.numel())
