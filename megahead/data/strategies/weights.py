"""Single tokens by weights of their ids that a file gives: those of parts of speech, say, or any other of one's own.

A `.npy` of numpy, a number above 0 for each id. It is read once and stays what it is over a run.
"""

from __future__ import annotations

import numpy as np

from megahead.config import MaskingConfig
from megahead.data.array_file import open_array
from megahead.data.strategies.strategy import WeighedIds
from megahead.data.strategies.training_text import TrainingText
from megahead.errors import ConfigError


class Weights(WeighedIds):
    """Tokens in proportion to the given weights."""

    @staticmethod
    def made(masking: MaskingConfig, text: TrainingText) -> Weights:
        """By the file that `data.id_weights` names; the training-free head will need the text's token counts."""
        text.token_counts()
        return Weights.read(str(text.config.data.id_weights), text.vocab_size)

    @staticmethod
    def read(path: str, vocab_size: int) -> Weights:
        """ConfigError unless the file has weights of so many ids; 1 of ids behind them, which only the model has. A
        URL's is fetched first."""
        weight_V = open_array("data.id_weights", "name a file of numpy", path)
        if weight_V.ndim != 1 or weight_V.dtype.kind not in "fiu" or not 0 < len(weight_V) <= vocab_size:
            rule = f"hold a number for each of at most model.vocab_size ({vocab_size}) ids"
            raise ConfigError("data.id_weights", rule, got=f"{weight_V.dtype} {weight_V.shape}")
        weight_V = weight_V.astype(np.float64)
        if not (np.isfinite(weight_V) & (weight_V > 0)).all():
            id_ = int(np.flatnonzero(~(np.isfinite(weight_V) & (weight_V > 0)))[0])
            raise ConfigError("data.id_weights", "hold numbers above 0", got=f"{weight_V[id_]:g} for id {id_}")
        return Weights(np.pad(weight_V, (0, vocab_size - len(weight_V)), constant_values=1.0))
