"""How many outputs' scores the softmax holds at once; `objectives` computes and `estimate` predicts memory with it."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ChunkSize:
    """How the outputs of a loss are cut into chunks."""

    score_bytes: int
    """Bytes of the scores that are held at once."""

    least_outputs: int
    """Outputs that a chunk may have however many candidates there are: each further chunk costs a pass over the
    gradient of all rows."""

    multiple: int
    """Outputs in a chunk are a multiple of this, unless there are fewer."""

    def outputs(self, total: int, candidates: int, score_size: int) -> int:
        """Outputs per chunk, of `total` outputs with this many candidates and scores of `score_size` bytes: equal
        chunks, no more of them than needed."""
        fitting = self.score_bytes // (candidates * score_size) // self.multiple * self.multiple
        chunks = math.ceil(total / max(self.least_outputs, fitting))
        return min(total, math.ceil(total / chunks / self.multiple) * self.multiple)


ON_CPU = ChunkSize(score_bytes=8 * 2**20, least_outputs=256, multiple=1)
"""Small beside the gradients, large enough that each chunk's products run at full speed (measured on one core, 16,384 x
4,300 x 512: the same from 2 to 32 MiB, and no slower than the three products alone; with 50,304 candidates 256 outputs
are 1.7 times as fast as 41)."""

ON_GPU = ChunkSize(score_bytes=128 * 2**20, least_outputs=1024, multiple=128)
"""float32 scores and half-precision residuals, 192 MiB together: so many, of 512 features, take an H100 0.34 ms or more
(computed); to ask for a chunk's kernels took an H200's host 0.14 to 0.25 ms (measured). With fewer than 1,024 outputs,
adding to the rows' gradient is bound by memory: 8 bytes moved for 2 n operations, n outputs. Products compute 128
outputs at a time."""
