"""Scores over a vocabulary whose rows come block by block, and are never there together.

N outputs, D features, b rows of a block, V vocabulary (the candidates, U elsewhere); n: the outputs of one chunk.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from megahead.config.loss_chunks import ON_CPU
from megahead.objectives.candidate_softmax import DOT, EvaluationSums
from megahead.objectives.candidates import Candidates
from megahead.objectives.scores import Score


@torch.no_grad()
def streamed_sums(
    outputs_ND: Tensor, blocks: Iterable[Tensor], vocabulary: Candidates, score: Score = DOT
) -> EvaluationSums:
    """The same as `evaluation_sums` over the whole vocabulary, whose rows arrive as consecutive blocks [b, D]; only one
    block is in memory at a time."""
    outputs_ND = score.outputs(outputs_ND)
    lowest = torch.finfo(
        torch.float32
    ).min  # not -inf, since (-inf) - (-inf) is nan, and all scores of a block may be -inf
    top_N = outputs_ND.new_full((len(outputs_ND),), lowest, dtype=torch.float32)  # of all but the positive
    total_N, positive_N, first = torch.zeros_like(top_N), torch.zeros_like(top_N), 0
    for rows_bD in blocks:
        rows_bD = score.rows(rows_bD)
        bias_b = None if vocabulary.bias_U is None else vocabulary.bias_U[first : first + len(rows_bD)]
        place_N = vocabulary.positive_N - first
        step = ON_CPU.outputs(len(outputs_ND), len(rows_bD), score_size=4)
        for n in range(0, len(outputs_ND), step):
            chunk = slice(n, n + step)
            scores_nb, place_n1 = _scores(outputs_ND[chunk], rows_bD, bias_b, score), place_N[chunk, None]
            here_n1, place_n1 = (place_n1 >= 0) & (place_n1 < len(rows_bD)), place_n1.clamp(0, len(rows_bD) - 1)
            found_n1 = scores_nb.gather(1, place_n1)
            positive_N[chunk] = torch.where(here_n1, found_n1, positive_N[chunk, None]).squeeze(1)
            scores_nb.scatter_(1, place_n1, found_n1.masked_fill(here_n1, -torch.inf))
            higher_n = torch.maximum(top_N[chunk], scores_nb.amax(1))
            total_N[chunk] *= torch.exp(top_N[chunk] - higher_n)
            total_N[chunk] += torch.exp(scores_nb.sub_(higher_n[:, None])).sum(1)
            top_N[chunk] = higher_n
        first += len(rows_bD)
    loss_N = torch.logaddexp(top_N + total_N.log(), positive_N) - positive_N
    return EvaluationSums.of(loss_N, positive_N > top_N, vocabulary)


def _scores(outputs_nD: Tensor, rows_bD: Tensor, bias_b: Tensor | None, score: Score) -> Tensor:
    dtype = torch.promote_types(torch.promote_types(outputs_nD.dtype, rows_bD.dtype), torch.float32)
    addend = outputs_nD.new_zeros(1, dtype=dtype) if bias_b is None else bias_b.to(dtype)
    scores_nb = outputs_nD.to(dtype) @ rows_bD.to(dtype).T
    score.link_(scores_nb)
    return scores_nb.mul_(score.scale).add_(addend)
