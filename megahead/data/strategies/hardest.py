"""Single tokens, more often those that the model misses: what it reads changes with what it has learned.

After adaptive masking by how well a model predicts each token (Edman, Fraser 2025, arXiv 2510.20475,
"Mask and You Shall Receive").
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from megahead.config import MaskingConfig
from megahead.data.difficulty import Difficulty
from megahead.data.strategies.strategy import WeighedIds
from megahead.data.strategies.training_text import TrainingText

FLOOR = 0.1
"""Added to all shares of misses, so that an id that is always predicted is asked for at times."""

PRIOR = 2
"""Targets that every id begins with, missed as often as all are together."""


@dataclass(frozen=True)
class Hardest(WeighedIds):
    """Ids in proportion to FLOOR plus the share of times that they were missed; all alike until that is known."""

    difficulty: Difficulty
    _latest: list[tuple[Tensor, Hardest]] = field(default_factory=list)
    """The counts that were last asked for, and what became of them: one pass over the vocabulary a period."""

    @staticmethod
    def made(masking: MaskingConfig, text: TrainingText) -> Hardest:
        """By what the run counts; the training-free head will need the text's token counts."""
        text.token_counts()
        assert text.difficulty is not None
        return Hardest(np.ones(text.vocab_size), text.difficulty)

    def at(self, step: int) -> Hardest:
        """With the weights of a step."""
        counts_V2 = self.difficulty.at(step)
        if not self._latest or self._latest[0][0] is not counts_V2:
            self._latest[:] = [(counts_V2, self._weighed_by(counts_V2))]
        return self._latest[0][1]

    def _weighed_by(self, counts_V2: Tensor) -> Hardest:
        misses_V, targets_V = counts_V2.numpy().astype(np.float64).T
        share = (misses_V.sum() + PRIOR) / (targets_V.sum() + PRIOR)
        weight_V = FLOOR + (misses_V + PRIOR * share) / (targets_V + PRIOR)
        return Hardest(weight_V[: len(self.weight_V)], self.difficulty)
