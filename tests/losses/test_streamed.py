"""Scores over rows that come block by block are those over all of them."""

from __future__ import annotations

import pytest
import torch

from megahead.config.objective import ChunkSize
from megahead.losses import fused_softmax
from megahead.losses.candidates import all_rows_as_candidates
from megahead.losses.scores import Dot
from megahead.losses.softmax import Softmax, streamed_sums
from support.row_kernel_cases import drawn, on_device


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("block", [1, 7, 50])
@pytest.mark.parametrize("chunk_bytes", [64, 1 << 20])
def test_blocks_and_chunks_give_what_the_whole_gives(
    biased: bool, block: int, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_softmax, "CPU_CHUNKS", ChunkSize(chunk_bytes, min_outputs=1, multiple=1))
    torch.manual_seed(block)
    outputs, rows = 3 * torch.randn(20, 8), torch.randn(50, 8)
    bias = torch.randn(50) if biased else None
    best = (outputs @ rows.T / 0.7 + (0.0 if bias is None else bias)).argmax(1)
    vocabulary = all_rows_as_candidates(torch.where(torch.arange(20) < 9, best, torch.randint(50, (20,))), bias)
    expected = Softmax(outputs, rows, vocabulary, Dot(0.7)).sums()
    ours = streamed_sums(outputs, rows.split(block), vocabulary, Dot(0.7))
    assert ours.loss == pytest.approx(expected.loss, rel=1e-5)
    assert (ours.correct, ours.targets) == (expected.correct, expected.targets)
    assert ours.correct >= 9


@pytest.mark.parametrize("kinds", [(torch.bfloat16,) * 3, (torch.float32, torch.bfloat16, torch.float64)])
def test_rows_of_any_precision_are_summed_up_in_full(kinds: tuple[torch.dtype, ...]) -> None:
    torch.manual_seed(0)
    outputs, rows, bias = (
        each.to(kind)
        for each, kind in zip((torch.randn(20, 8), torch.randn(50, 8), torch.randn(50)), kinds, strict=True)
    )
    positive = torch.randint(50, (20,))
    full = streamed_sums(outputs.float(), rows.float().split(7), all_rows_as_candidates(positive, bias.float()))
    ours = streamed_sums(outputs, rows.split(7), all_rows_as_candidates(positive, bias))
    assert ours.loss == pytest.approx(full.loss, rel=1e-6)


def test_extreme_scores_stay_finite() -> None:
    outputs, rows = torch.tensor([[100.0], [-100.0]]), torch.tensor([[-100.0], [0.0], [100.0]])
    sums = streamed_sums(outputs, rows.split(1), all_rows_as_candidates(torch.tensor([0, 2])))
    assert sums.loss == pytest.approx(4e4)


@pytest.mark.parametrize("block", [1, 2, 3])
def test_a_tie_counts_as_wrong_as_it_does_for_the_whole(block: int) -> None:
    outputs, rows = torch.ones(2, 1), torch.tensor([[1.0], [0.0], [1.0]])
    vocabulary = all_rows_as_candidates(torch.tensor([0, 2]))
    assert streamed_sums(outputs, rows.split(block), vocabulary).correct == 0
    assert Softmax(outputs, rows, vocabulary).sums().correct == 0


def test_without_outputs_all_blocks_are_read_and_there_is_nothing_to_sum_up() -> None:
    """Blocks come from other ranks, which wait until they are read."""
    blocks = iter(torch.randn(50, 8).split(7))
    sums = streamed_sums(torch.zeros(0, 8), blocks, all_rows_as_candidates(torch.zeros(0, dtype=torch.int64)))
    assert (sums.loss, sums.correct, sums.targets, next(blocks, None)) == (0.0, 0, 0, None)


@pytest.mark.parametrize(
    ("kind", "n", "v", "d", "block"),
    [("cpu", 23, 37, 24, 10), pytest.param("cuda", 3000, 50277, 512, 8192, marks=pytest.mark.gpu)],
)
def test_on_a_gpu_blocks_go_through_the_kernel_and_give_what_float64_gives(
    kind: str, n: int, v: int, d: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Triton's interpreter on a CPU."""
    kernel = pytest.importorskip("megahead.losses.triton_kernel", exc_type=ImportError)
    outputs, rows, candidates = drawn(n, v, d, torch.bfloat16, on_device(kind, monkeypatch), apart=False)
    scored: list[int] = []
    plain = kernel.TritonChunkSoftmax.stats
    monkeypatch.setattr(
        kernel.TritonChunkSoftmax, "stats", lambda step, *given: [scored.append(1), plain(step, *given)][1]
    )
    vocabulary = all_rows_as_candidates(candidates.target_N, candidates.bias_U)
    mine = streamed_sums(outputs, rows.split(block), vocabulary, Dot(0.7))
    exact = Softmax(outputs.double(), rows.double(), vocabulary, Dot(0.7)).sums()
    assert len(scored) >= -(-v // block)
    assert mine.loss == pytest.approx(exact.loss, rel=1e-5)
    assert abs(mine.correct - exact.correct) <= n // 1000
