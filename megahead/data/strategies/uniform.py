"""Single tokens, all with the same chance (BERT)."""

from __future__ import annotations

from typing import Any

import numpy as np

from megahead.config import MaskingConfig
from megahead.data.counter_rng import CounterRng
from megahead.data.strategies.strategy import AllAlike
from megahead.data.strategies.training_text import TrainingText

Array = np.ndarray[Any, Any]


class Uniform(AllAlike):
    """Every token is a unit."""

    @staticmethod
    def made(masking: MaskingConfig, text: TrainingText) -> Uniform:
        """Needs neither."""
        return Uniform()

    def starts(self, tokens_BT: Array, noise: CounterRng) -> Array:
        return np.ones(tokens_BT.shape, bool)
