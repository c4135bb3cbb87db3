"""Spans of random lengths (SpanBERT, Joshi et al. 2020, arXiv 1907.10529)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megahead.config import MaskingConfig
from megahead.data.counter_rng import CounterRng, Purpose
from megahead.data.strategies.strategy import AllAlike
from megahead.data.strategies.training_text import TrainingText

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Spans(AllAlike):
    """Spans whose lengths follow the paper's distribution, geometric of what is at most `max_tokens`: P(l) is in
    proportion to stop (1 - stop)^(l - 1), mean 3.8 for 0.2 and 10. Lengths are in tokens; the paper's are in words.

    The whole row is divided into such spans, so that those that are chosen have these lengths and never overlap.
    """

    stop: float
    max_tokens: int

    @staticmethod
    def made(masking: MaskingConfig, text: TrainingText) -> Spans:
        """By the settings alone."""
        return Spans(masking.span_stop, masking.longest_unit(text.config.data.sequence_length))

    def starts(self, tokens_BT: Array, noise: CounterRng) -> Array:
        rows, length = tokens_BT.shape
        draw_BT = noise.uniform(Purpose.SPAN_LENGTHS, length)
        with np.errstate(divide="ignore"):
            tail = np.log1p(-self.stop)
        reached = -np.expm1(tail * self.max_tokens)  # the share of lengths up to the longest
        lengths_BT = np.ceil(np.log1p(-draw_BT * reached) / tail).astype(np.int64)
        ends_BT = lengths_BT.clip(1, self.max_tokens).cumsum(1)
        starts_BT = np.zeros((rows, length), bool)
        starts_BT[:, 0] = True
        row_B, span_B = np.nonzero(ends_BT < length)
        starts_BT[row_B, ends_BT[row_B, span_B]] = True
        return starts_BT
