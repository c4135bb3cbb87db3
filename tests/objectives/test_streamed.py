"""Scores over rows that come block by block are those over all of them."""

from __future__ import annotations

import pytest
import torch

import megahead.objectives.streamed as streamed
from megahead.objectives import streamed_sums, vocabulary_candidates
from megahead.objectives.candidate_softmax import evaluation_sums


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("block", [1, 7, 50])
@pytest.mark.parametrize("chunk_bytes", [64, 1 << 20])
def test_blocks_and_chunks_give_what_the_whole_gives(
    biased: bool, block: int, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streamed, "CHUNK_BYTES", chunk_bytes)
    torch.manual_seed(block)
    outputs, rows = 3 * torch.randn(20, 8), torch.randn(50, 8)
    bias = torch.randn(50) if biased else None
    best = (outputs @ rows.T / 0.7 + (0.0 if bias is None else bias)).argmax(1)
    vocabulary = vocabulary_candidates(torch.where(torch.arange(20) < 9, best, torch.randint(50, (20,))), bias)
    expected = evaluation_sums(outputs, rows, vocabulary, 0.7)
    ours = streamed_sums(outputs, rows.split(block), vocabulary, 0.7)
    assert ours.loss == pytest.approx(expected.loss, rel=1e-5)
    assert (ours.correct, ours.targets) == (expected.correct, expected.targets)
    assert ours.correct >= 9


def test_extreme_scores_stay_finite() -> None:
    outputs, rows = torch.tensor([[100.0], [-100.0]]), torch.tensor([[-100.0], [0.0], [100.0]])
    sums = streamed_sums(outputs, rows.split(1), vocabulary_candidates(torch.tensor([0, 2])))
    assert sums.loss == pytest.approx(4e4)
