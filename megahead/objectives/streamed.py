"""Scores over a vocabulary whose rows come block by block, and are never there together.

N outputs, D features, b rows of a block, V vocabulary (the candidates, U elsewhere).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from megahead.distributed import Group
from megahead.objectives.candidate_softmax import DOT, EvaluationSums
from megahead.objectives.candidates import Candidates
from megahead.objectives.row_step import RowSums
from megahead.objectives.scores import Score
from megahead.objectives.three_products import softmax_sums


@torch.no_grad()
def streamed_sums(
    outputs_ND: Tensor, blocks: Iterable[Tensor], vocabulary: Candidates, score: Score = DOT
) -> EvaluationSums:
    """The same as `evaluation_sums` over the whole vocabulary, whose rows arrive as consecutive blocks [b, D]; only one
    block is in memory at a time. On GPUs by the kernel, as there."""
    outputs_ND, first = score.outputs(outputs_ND), 0
    found: RowSums | None = None
    for rows_bD in blocks:  # all of them, as they may come from other ranks
        if len(outputs_ND):
            among = _within(vocabulary, first, len(rows_bD))
            sums = softmax_sums(outputs_ND, score.rows(rows_bD), among, score, Group())
            found = sums if found is None else found.beside(sums)
        first += len(rows_bD)
    if found is None:
        return EvaluationSums(0.0, 0, 0, 0.0)
    return EvaluationSums.of(found.lse - found.biased, found.biased > found.rivals, vocabulary)


def _within(vocabulary: Candidates, first: int, count: int) -> Candidates:
    """So many candidates from the one numbered `first` on; positives elsewhere are outside of them."""
    bias_b = None if vocabulary.bias_U is None else vocabulary.bias_U[first : first + count]
    return Candidates(None, bias_b, vocabulary.positive_N - first)
