"""Single tokens, rare ones more often."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megahead.config import MaskingConfig
from megahead.data.strategies.strategy import WeighedIds
from megahead.data.strategies.training_text import TrainingText


class Frequency(WeighedIds):
    """Tokens in proportion to (count + 1)^-power (after Zhang et al. 2023)."""

    @staticmethod
    def made(masking: MaskingConfig, text: TrainingText) -> Frequency:
        """By the counts that preprocessing has put beside the datasets."""
        return Frequency.of(text.token_counts().tolist(), masking.frequency_power)

    @staticmethod
    def of(token_counts: Sequence[int], power: float) -> Frequency:
        """From each id's count in the training text."""
        return Frequency((np.asarray(token_counts, np.float64) + 1) ** -power)
