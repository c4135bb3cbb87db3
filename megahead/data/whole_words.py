"""Masking strategy: all tokens of a word together."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from megahead.config.masking import MaskingConfig
from megahead.data.indexed import Array
from megahead.data.samples import CounterRng
from megahead.data.strategy import EqualWeights, TrainingText, split_long_units

# BERT's whole word masking, defined alike for all tokenizers. A word is a run of letters of one script and of digits,
# with their combining marks. Leading spaces and the tokenizer's prefix symbols do not matter. Every other token
# (punctuation, symbols, spaces) is a unit of its own, and so is every token of a script that is written without spaces.
# Byte-level tokens of one character, with the combining marks that follow it, are always masked together.
# M tokens of all rows, K bytes of these tokens, C characters, V vocabulary.

_SEPARATOR, _WITHOUT_SPACES, _MARK, _DIGIT, _LETTER = range(5)
"""Kinds of characters (_MARK: combining marks). Each script has its own number, from _LETTER on."""

_ROW_SEPARATOR = b"\0\0\0"
"""Three bytes, so that decoding an incomplete last character of a row reads nothing of the next row."""

_SCRIPTS_WITHOUT_SPACES = (
    *("CJK", "HIRAGANA", "KATAKANA", "HALFWIDTH", "BOPOMOFO", "YI"),
    *("THAI", "LAO", "KHMER", "MYANMAR", "TAI", "NEW", "JAVANESE", "BALINESE"),
)
"""The first word of their letters' Unicode names (NEW stands for NEW TAI LUE)."""


@dataclass(frozen=True)
class WholeWords(EqualWeights):
    """A word is a unit. A word longer than `max_tokens` is split into units of at most that many tokens."""

    bytes_: Array
    """uint8: the bytes of all ids and of the row separator, concatenated."""

    ends_V: Array
    """int64: the end of each id's bytes in `bytes_`."""

    max_tokens: int

    @staticmethod
    def build(masking: MaskingConfig, text: TrainingText) -> WholeWords:
        """From the settings and the tokenizer of the run."""
        return WholeWords.from_bytes(text.bytes_of_ids(), masking.max_unit_length(text.config.data.sequence_length))

    @staticmethod
    def from_bytes(bytes_of_ids: Sequence[bytes | None], max_tokens: int) -> WholeWords:
        """From the bytes of each id, including a leading space. None marks a special token, which is in no word."""
        texts = [*(text or b"\0" for text in bytes_of_ids), _ROW_SEPARATOR]
        ends_V = np.cumsum([len(text) for text in texts])
        return WholeWords(np.frombuffer(b"".join(texts), np.uint8), ends_V, max_tokens)

    def starts(self, tokens_BT: Array, rng: CounterRng) -> Array:
        padded_BT = np.pad(tokens_BT, ((0, 0), (1, 0)), constant_values=len(self.ends_V) - 1)
        continues_word_M, continues_character_M = self._continuations(padded_BT.reshape(-1))
        starts_BT = ~continues_word_M.reshape(padded_BT.shape)[:, 1:]
        return split_long_units(self.max_tokens, starts_BT, continues_character_M.reshape(padded_BT.shape)[:, 1:])

    def _continuations_by_bytes(self, tokens_M: Array) -> tuple[Array, Array]:
        """bool [M] each: whether a token continues the word of the one before; whether it continues its character."""
        char_M, last_char_M, kind_C, base_C = self._characters(tokens_M)
        previous_M = np.roll(last_char_M, 1)
        continues_character_M = (char_M == previous_M) | (kind_C[char_M] == _MARK)
        is_same_word_M = _is_same_word(kind_C[base_C[char_M]], kind_C[base_C[previous_M]])
        return continues_character_M | is_same_word_M, continues_character_M

    def _continuations(self, tokens_M: Array) -> tuple[Array, Array]:
        """Equal to `_continuations_by_bytes`, except for the first token, which has no predecessor. Decodes only around
        ids with incomplete characters: from one token before, which has the base character, to three tokens after,
        because a character has at most four bytes."""
        is_complete_V, first_kind_V, last_kind_V = self._character_tables
        continues_word_M = _is_same_word(first_kind_V[tokens_M], np.roll(last_kind_V[tokens_M], 1))
        continues_character_M, decoded_M = np.zeros((2, len(tokens_M)), bool)
        index_N5 = np.flatnonzero(~is_complete_V[tokens_M])[:, None] + np.arange(-1, 4)
        decoded_M[index_N5.clip(0, len(tokens_M) - 1)] = True
        if decoded_M.any():
            known_M = decoded_M & np.roll(decoded_M, 1)
            in_word_M, in_character_M = self._continuations_by_bytes(tokens_M[decoded_M])
            continues_word_M[known_M] = in_word_M[known_M[decoded_M]]
            continues_character_M[known_M] = in_character_M[known_M[decoded_M]]
        return continues_word_M, continues_character_M

    @cached_property
    def _character_tables(self) -> tuple[Array, Array, Array]:
        """[V] each: whether an id consists of complete characters and does not begin with a mark; the kind of its first
        character; the kind of its last character that is no mark. The kinds are valid for complete ids."""
        texts = (text.tobytes() for text in np.split(self.bytes_, self.ends_V[:-1]))
        is_utf8_V = np.array([text.decode(errors="ignore").encode() == text for text in texts])
        char_V, last_char_V, kind_C, base_C = self._characters(np.arange(len(self.ends_V)))
        return is_utf8_V & (kind_C[char_V] != _MARK), kind_C[char_V], kind_C[base_C[last_char_V]]

    def _characters(self, tokens_M: Array) -> tuple[Array, Array, Array, Array]:
        """int64 [M] twice: the index of the character with each token's first byte, and with its last byte. [C] twice:
        the kind of each character, and the index of its base character (itself unless it is a mark)."""
        size_M = np.diff(self.ends_V, prepend=0)[tokens_M]
        last_M = size_M.cumsum() - 1
        byte_K = self.bytes_[np.repeat(self.ends_V[tokens_M] - 1 - last_M, size_M) + np.arange(size_M.sum())]
        is_lead_K = (byte_K & 0xC0) != 0x80
        is_lead_K[:1] = True
        char_K = is_lead_K.cumsum() - 1
        kind_C = _character_kinds()[_code_points(byte_K, np.flatnonzero(is_lead_K))]
        base_C = np.maximum.accumulate(np.where(kind_C == _MARK, 0, np.arange(len(kind_C))))
        return char_K[last_M + 1 - size_M], char_K[last_M], kind_C, base_C


def _is_same_word(kind_M: Array, previous_kind_M: Array) -> Array:
    """bool [M]: whether adjacent characters of these kinds belong to one word."""
    min_M, max_M = np.minimum(kind_M, previous_kind_M), np.maximum(kind_M, previous_kind_M)
    is_same_M: Array = (min_M == _DIGIT) | ((min_M >= _LETTER) & (min_M == max_M))
    return is_same_M


def _code_points(byte_K: Array, lead_C: Array) -> Array:
    """int64 [C]: code points of the characters whose first bytes are at `lead_C`; arbitrary for incomplete ones."""
    padded_K = np.pad(byte_K, (0, 3)).astype(np.int64)
    code_C = padded_K[lead_C]
    length_C = 1 + sum((code_C >= first).astype(np.int64) for first in (0xC0, 0xE0, 0xF0))
    code_C = np.where(length_C > 1, code_C & (0x7F >> length_C), code_C)
    for offset in (1, 2, 3):
        code_C = np.where(length_C > offset, code_C << 6 | padded_K[lead_C + offset] & 0x3F, code_C)
    return np.minimum(code_C, 0x10FFFF)


@cache
def _character_kinds() -> Array:
    """int16 [0x110000]: the kind of each Unicode character; takes 0.3 s, once."""
    kind_by_script = dict.fromkeys(_SCRIPTS_WITHOUT_SPACES, _WITHOUT_SPACES)

    def kind(char: str) -> int:
        category = unicodedata.category(char)
        if category[0] == "M" or category in ("Lm", "Cf"):  # modifier letters and format characters, too
            return _MARK
        if category[0] == "N":
            return _DIGIT
        if category[0] != "L":
            return _SEPARATOR
        return kind_by_script.setdefault(unicodedata.name(char, "?").split()[0], _LETTER + len(kind_by_script))

    return np.array([kind(chr(code)) for code in range(0x110000)], np.int16)
