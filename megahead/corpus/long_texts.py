"""Cuts a very long text into pieces that are tokenized one by one, to save memory; only where that changes no id."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

PIECE = 1 << 20
"""About how many characters a piece has."""

AROUND = 256
"""Characters on either side of a cut that are tokenized with and without it."""

SEARCHED = 1 << 16
"""Characters that are searched for a place to cut; if there is none, the rest stays whole."""

_WORD_START = re.compile(r"(?=\s\w)")
Encode = Callable[[Sequence[str]], list[list[int]]]


def pieces(text: str, encode: Encode) -> Iterator[str]:
    """`text` in pieces of about a million characters, whose ids by `encode`, concatenated, are the ids of `text`.

    Cuts before the space in front of a word, if the ids around the cut are the same with and without it. That is exact,
    since all common tokenizers pre-tokenize there. If no such place is found, the rest stays whole.
    """
    start = 0
    while len(text) - start >= 2 * PIECE:
        cut = _place(text, start + PIECE, encode)
        yield text[start:cut]
        start = cut
    if start < len(text):
        yield text[start:]


def _place(text: str, near: int, encode: Encode) -> int:
    """The first place from `near` on where a cut changes nothing, else the end."""
    for word in _WORD_START.finditer(text, near, near + SEARCHED):
        cut = word.start()
        left, right = text[cut - AROUND : cut], text[cut : cut + AROUND]
        whole, first, second = encode([left + right, left, right])
        if whole == first + second:
            return cut
    return len(text)
