"""Scores over a vocabulary whose rows come block by block, and are never there together.

N outputs, D features, b rows of a block, V vocabulary; lower-case n: the outputs of one chunk.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from megahead.config.loss_chunks import CHUNK_BYTES
from megahead.objectives.candidate_softmax import EvaluationSums
from megahead.objectives.candidates import Candidates
from megahead.objectives.chunked import promoted


@torch.no_grad()
def streamed_sums(
    outputs_ND: Tensor, blocks: Iterable[Tensor], vocabulary: Candidates, temperature: float = 1.0
) -> EvaluationSums:
    """What `evaluation_sums` gives for all rows, consecutive [b, D], of which at most one block is held.

    A target whose score ties with the largest counts as correct.
    """
    top_N = outputs_ND.new_full((len(outputs_ND),), -torch.inf, dtype=torch.float32)
    total_N, own_N, first = torch.zeros_like(top_N), torch.zeros_like(top_N), 0
    for rows_bD in blocks:
        bias_b = None if vocabulary.bias_U is None else vocabulary.bias_U[first : first + len(rows_bD)]
        place_N = vocabulary.positive_N - first
        step = max(1, CHUNK_BYTES // (4 * len(rows_bD)))
        for n in range(0, len(outputs_ND), step):
            chunk = slice(n, n + step)
            scores_nb = _scores(outputs_ND[chunk], rows_bD, bias_b, temperature)
            here_n = (place_N[chunk] >= 0) & (place_N[chunk] < len(rows_bD))
            own_n = scores_nb.gather(1, place_N[chunk, None].clamp(0, len(rows_bD) - 1)).squeeze(1)
            own_N[chunk] = torch.where(here_n, own_n, own_N[chunk])
            higher_n = torch.maximum(top_N[chunk], scores_nb.amax(1))
            total_N[chunk] *= torch.exp(top_N[chunk] - higher_n)
            total_N[chunk] += torch.exp(scores_nb.sub_(higher_n[:, None])).sum(1)
            top_N[chunk] = higher_n
        first += len(rows_bD)
    loss = (top_N + total_N.log() - own_N).double().sum()
    return EvaluationSums(float(loss), int((own_N >= top_N).sum()), len(outputs_ND))


def _scores(outputs_nD: Tensor, rows_bD: Tensor, bias_b: Tensor | None, temperature: float) -> Tensor:
    outputs_nD, rows_bD = promoted(outputs_nD, rows_bD)
    addend = outputs_nD.new_zeros(1) if bias_b is None else bias_b.to(outputs_nD.dtype)
    return torch.addmm(addend, outputs_nD, rows_bD.T, alpha=1 / temperature)
