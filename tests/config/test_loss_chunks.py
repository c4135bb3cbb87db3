"""Chunks of a loss: as few as fit, and even."""

from __future__ import annotations

import pytest

from megahead.config.objective import CPU_CHUNKS, GPU_CHUNKS, ChunkSize


@pytest.mark.parametrize(
    ("total", "candidates", "score_size", "outputs"),
    [
        (16384, 50304, 2, 16384),
        (65536, 16384, 2, 65536),
        (65536, 50304, 2, 16384),  # 21,248 would fit: four chunks either way, and the last is not a remnant
        (1000, 4608, 6, 1000),
        (16384, 50304, 6, 5504),
        (16384, 1048576, 2, 1024),
        (16384, 2097152, 2, 1024),  # no fewer, though they do not fit
        (1100, 2097152, 2, 640),
    ],
)
def test_chunks_for_gpus_are_even_multiples_of_what_is_computed_at_once(
    total: int, candidates: int, score_size: int, outputs: int
) -> None:
    assert GPU_CHUNKS.outputs_per_chunk(total, candidates, score_size) == outputs


@pytest.mark.parametrize("size", [CPU_CHUNKS, GPU_CHUNKS, ChunkSize(1, 1, 1)])
@pytest.mark.parametrize("total", [1, 100, 1025, 40_000])
@pytest.mark.parametrize("candidates", [1, 3000, 1_000_000])
def test_scores_stay_within_the_bytes_unless_a_chunk_has_the_least_outputs(
    size: ChunkSize, total: int, candidates: int
) -> None:
    outputs = size.outputs_per_chunk(total, candidates, 4)
    assert 1 <= outputs <= total
    assert outputs * candidates * 4 <= size.score_bytes or outputs <= size.min_outputs
