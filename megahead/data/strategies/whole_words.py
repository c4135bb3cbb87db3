"""All tokens of a word together (BERT's "whole word masking")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megahead.config import MaskingConfig
from megahead.data.counter_rng import CounterRng
from megahead.data.strategies.strategy import AllAlike
from megahead.data.strategies.training_text import TrainingText

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class WholeWords(AllAlike):
    """A word is a unit."""

    continues_V: Array
    """bool [V]: whether an id continues the word before it."""

    @staticmethod
    def made(masking: MaskingConfig, text: TrainingText) -> WholeWords:
        """By the spelling of the run's tokenizer."""
        return WholeWords.of(text.spellings())

    @staticmethod
    def of(spellings: Sequence[str | None]) -> WholeWords:
        """From how a tokenizer spells its tokens: WordPiece marks tokens that continue a word, byte-level BPE and
        SentencePiece mark those that begin one. Any may have a few tokens that look like the other's marks, such as
        Markdown's `##`: it is taken for what most marks are."""
        known = [text or "" for text in spellings]
        continues_V = np.array([text.startswith("##") for text in known])
        begins_V = np.array([text.startswith(("Ġ", "▁", "Ċ")) for text in known])
        return WholeWords(continues_V if continues_V.sum() > begins_V.sum() else ~begins_V)

    def starts(self, tokens_BT: Array, noise: CounterRng) -> Array:
        starts_BT: Array = ~self.continues_V[tokens_BT]
        return starts_BT
