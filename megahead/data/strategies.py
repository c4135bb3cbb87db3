"""Masking strategies: how a row is cut into units, and how likely each is selected.

A unit is a span of tokens that are masked together, all or none. B rows, T tokens per row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from megahead.data.collocations import Collocations
from megahead.data.counter_rng import CounterRng

Array = np.ndarray[Any, Any]

_SPANS = 17  # a purpose of random numbers, apart from the masker's


class Strategy(Protocol):
    """One way to cut rows into units."""

    def starts(self, tokens_BT: Array, noise: CounterRng) -> Array:
        """bool [B, T]: where a unit begins. Special tokens always end a unit."""
        ...

    def weights(self, tokens_BT: Array) -> Array | None:
        """float64 [B, T], above 0: how likely each token is selected, relative to the others; None: all alike."""
        ...


class Uniform:
    """Single tokens, all with the same chance (BERT)."""

    def starts(self, tokens_BT: Array, noise: CounterRng) -> Array:
        return np.ones(tokens_BT.shape, bool)

    def weights(self, tokens_BT: Array) -> Array | None:
        return None


@dataclass(frozen=True)
class Frequency(Uniform):
    """Single tokens, rare ones more often: in proportion to (count + 1)^-power (after Zhang et al. 2023)."""

    weight_V: Array

    @staticmethod
    def of(token_counts: Sequence[int], power: float) -> Frequency:
        """From each id's count in the training text."""
        return Frequency((np.asarray(token_counts, np.float64) + 1) ** -power)

    def weights(self, tokens_BT: Array) -> Array | None:
        weights_BT: Array = self.weight_V[tokens_BT]
        return weights_BT


@dataclass(frozen=True)
class WholeWords(Uniform):
    """All tokens of a word together (BERT's "whole word masking")."""

    continues_V: Array
    """bool [V]: whether an id continues the word before it."""

    @staticmethod
    def of(spellings: Sequence[str | None]) -> WholeWords:
        """From how a tokenizer spells its tokens: WordPiece marks tokens that continue a word, byte-level BPE and
        SentencePiece mark those that begin one."""
        known = [text or "" for text in spellings]
        if any(text.startswith("##") for text in known):
            return WholeWords(np.array([text.startswith("##") for text in known]))
        return WholeWords(np.array([not text.startswith(("Ġ", "▁", "Ċ")) for text in known]))

    def starts(self, tokens_BT: Array, noise: CounterRng) -> Array:
        starts_BT: Array = ~self.continues_V[tokens_BT]
        return starts_BT


@dataclass(frozen=True)
class Spans(Uniform):
    """Spans whose lengths follow a geometric distribution, cut at `max_tokens` (SpanBERT, Joshi et al. 2020, arXiv
    1907.10529).

    The whole row is divided into such spans, so that those that are chosen have these lengths and never overlap.
    """

    stop: float
    max_tokens: int

    def starts(self, tokens_BT: Array, noise: CounterRng) -> Array:
        rows, length = tokens_BT.shape
        draw_BT = noise.uniform(_SPANS, length)
        with np.errstate(divide="ignore"):
            tail = np.log1p(-self.stop)
        lengths_BT = np.minimum(np.ceil(np.log(draw_BT) / tail), self.max_tokens).astype(np.int64)
        ends_BT = np.maximum(lengths_BT, 1).cumsum(1)
        starts_BT = np.zeros((rows, length), bool)
        starts_BT[:, 0] = True
        row_B, span_B = np.nonzero(ends_BT < length)
        starts_BT[row_B, ends_BT[row_B, span_B]] = True
        return starts_BT


@dataclass(frozen=True)
class Pmi(Uniform):
    """Collocations (neighbours far more often than by chance) together, other tokens alone (after Levine et al. 2021,
    arXiv 2010.01825).

    A unit is extended as long as its last token and the next are a collocation, up to `max_tokens` tokens.
    """

    collocations: Collocations
    max_tokens: int

    def starts(self, tokens_BT: Array, noise: CounterRng) -> Array:
        starts_BT = np.ones(tokens_BT.shape, bool)
        starts_BT[:, 1:] = ~self.collocations.contain(tokens_BT[:, :-1], tokens_BT[:, 1:])
        length_B = np.ones(len(tokens_BT), np.int64)
        for place in range(1, tokens_BT.shape[1]):
            starts_BT[:, place] |= length_B >= self.max_tokens
            length_B = np.where(starts_BT[:, place], 1, length_B + 1)
        return starts_BT
