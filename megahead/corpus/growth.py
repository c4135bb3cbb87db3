"""Gives a byte-level BPE tokenizer more tokens, for languages that it cuts into too many pieces.

Training goes on where it ended: words of the new text are cut by the tokenizer, and pairs of its own tokens are merged.
Each token is written as one character for that, its *letter*, since a trainer merges characters.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from megahead.errors import DataError, FieldError

LEAST = 2
"""How often a pair must occur: of a token that occurs once nothing is learned."""
_TEXTS_AT_ONCE = 64
_MORE = 64
"""Merges that are learned beyond those wanted: some make tokens that are there already."""
_FIRST, _SURROGATES, _LAST = 0x21, range(0xD800, 0xE000), 0x110000
Array = np.ndarray[Any, Any]


def grown(tokenizer: Tokenizer, texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """The tokenizer with those merges of its tokens that `texts` need most often, up to `vocab_size` ids.

    Old ids stay, and old merges come first: text without new tokens is cut as before. The vocabulary is smaller than
    asked for if the text has too few distinct pieces. DataError for another kind of tokenizer, and for text
    that gives it no token.
    """
    content = json.loads(tokenizer.to_str())
    if content["model"]["type"] != "BPE" or "ByteLevel" not in json.dumps(content["pre_tokenizer"]):
        raise DataError("a tokenizer to extend with text must be byte-level BPE, but is not; train a new one.")
    ids = tokenizer.get_vocab(with_added_tokens=True)
    size = max(ids.values()) + 1
    if vocab_size <= size:
        raise FieldError("vocab_size", f"be above that of the tokenizer to extend ({size:,})", got=f"{vocab_size:,}")
    letters_V, wanted = _letters(size), vocab_size - size
    merges = _learned(_in_letters(tokenizer, texts, letters_V), letters_V, wanted + wanted // 8 + _MORE)
    _append(content["model"], ids, merges, vocab_size)
    if len(content["model"]["vocab"]) == len(ids):
        raise DataError(f"the text must have pieces that occur {LEAST} times to be new tokens, but has none; add text.")
    return Tokenizer.from_str(json.dumps(content))


def _letters(size: int) -> Array:
    """uint32 [size]: a character for each id, increasing; never a space or half of a pair."""
    letters = np.arange(_FIRST, _FIRST + size, dtype=np.uint32)
    letters[letters >= _SURROGATES.start] += len(_SURROGATES)
    if letters[-1] >= _LAST:
        raise FieldError("vocab_size", f"be below {_LAST - len(_SURROGATES) - _FIRST:,} to be extended to", got=size)
    return letters


def _in_letters(tokenizer: Tokenizer, texts: Iterable[str], letters_V: Array) -> Iterator[str]:
    """Each text as words, separated by spaces, of a letter for each token."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    rest = iter(texts)
    while some := list(islice(rest, _TEXTS_AT_ONCE)):
        for encoding in tokenizer.encode_batch(some, add_special_tokens=False):
            words = np.array([-1 if word is None else word for word in encoding.word_ids], np.int64)
            breaks = np.flatnonzero(np.diff(words)) + 1
            yield np.insert(letters_V[encoding.ids], breaks, ord(" ")).astype("<u4").tobytes().decode("utf-32-le")


def _learned(words: Iterator[str], letters_V: Array, count: int) -> list[tuple[list[int], list[int]]]:
    """Up to `count` merges, in order: the old tokens that the two sides of each are made of."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    alphabet = list(letters_V.astype("<u4").tobytes().decode("utf-32-le"))
    trainer = trainers.BpeTrainer(
        vocab_size=len(letters_V) + count, min_frequency=LEAST, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(words, trainer)
    id_of = {letter: id_ for id_, letter in enumerate(alphabet)}
    merges = json.loads(bpe.to_str())["model"]["merges"]
    return [([id_of[one] for one in left], [id_of[one] for one in right]) for left, right in merges]


def _append(
    model: dict[str, Any], ids: dict[str, int], merges: list[tuple[list[int], list[int]]], vocab_size: int
) -> None:
    """Writes merges and their tokens, up to `vocab_size` ids; added tokens too, so that they keep theirs."""
    spelled, vocabulary = {id_: token for token, id_ in ids.items()}, dict(ids)
    gaps = max(ids.values()) + 1 - len(ids)
    pairs = dict.fromkeys(tuple(pair) for pair in model["merges"])
    for sides in merges:
        if len(vocabulary) + gaps == vocab_size:
            break
        left, right = ("".join(spelled[id_] for id_ in side) for side in sides)
        pairs[left, right] = None  # one that is known stays in its place
        vocabulary.setdefault(left + right, len(vocabulary) + gaps)
    model["merges"], model["vocab"] = [list(pair) for pair in pairs], vocabulary
