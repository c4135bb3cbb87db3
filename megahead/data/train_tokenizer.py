"""Trains tokenizers, and extends trained ones."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from megahead.data.indexed import Array
from megahead.data.records import Selection
from megahead.data.sources import find_inputs, total_bytes
from megahead.data.tokenizer import from_sentencepiece
from megahead.data.writer import NO_PROGRESS, ProgressBar
from megahead.errors import DataError, FieldError
from megahead.files import write_atomically

# Some ids are fixed, as other code relies on them: `<|endoftext|>` is 0 and `<|padding|>` 1, in a multilingual BPE
# `[CLS]`, `[SEP]` and `[MASK]` 2 to 4; in WordPiece BERT's five special tokens are 0 to 4. If the text has too few
# distinct pieces, the vocabulary is smaller than requested.

TEXT_TOKENS = ("<|endoftext|>", "<|padding|>")
BERT_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ENCODER_TOKENS = ("[CLS]", "[SEP]", "[MASK]")
BYTES = 256
WORD_PATTERN = (
    r"[^\r\n\p{L}\p{M}\p{N}]?[\p{L}\p{M}]+|\p{N}{1,3}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pre-tokens of a multilingual vocabulary: letters with their marks, up to three digits, signs, space. GPT-2's pattern
has no marks, and so splits each word of Hindi, Bengali, Telugu or Thai at its vowel signs."""
LONG_WORD = re.compile(r"\w{64}(?=\w)")
"""Longer words, as in text without spaces, are split: training time is quadratic in the length of a word."""
MAX_LINE_BYTES = 4000  # SentencePiece drops sentences of more than 4,192 bytes


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE as GPT-2 has it, lossless on any text: no normalization, and all 256 bytes are tokens."""
    return _byte_level(texts, vocab_size, pre_tokenizers.ByteLevel(add_prefix_space=False), TEXT_TOKENS, 0)


def train_multilingual(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE for many scripts and large vocabularies: words are split by WORD_PATTERN, and a pair that
    occurs only once is not merged. Encoders' special tokens are 2 to 4."""
    words = pre_tokenizers.Split(Regex(WORD_PATTERN), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    special = (*TEXT_TOKENS, *ENCODER_TOKENS)
    tokenizer = _byte_level(texts, vocab_size, pre_tokenizers.Sequence([words, byte_level]), special, 2)
    return set_mask_lstrip(tokenizer)


def _byte_level(
    texts: Iterable[str], vocab_size: int, words: pre_tokenizers.PreTokenizer, special: Sequence[str], min_count: int
) -> Tokenizer:
    _require_vocab_size(vocab_size, BYTES + len(special))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = words
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_count,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_split_long_words(texts), trainer)
    return tokenizer


def train_wordpiece(texts: Iterable[str], vocab_size: int, *, lowercase: bool = False) -> Tokenizer:
    """WordPiece as BERT uses it. Characters rarer than the thousand most frequent become `[UNK]`. A small vocabulary
    has room for fewer: half its size, as each may be two tokens (`x` and `##x`)."""
    _require_vocab_size(vocab_size, len(BERT_TOKENS) + 2)
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=list(BERT_TOKENS),
        limit_alphabet=min(1000, (vocab_size - len(BERT_TOKENS)) // 2),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_split_long_words(texts), trainer)
    return tokenizer


def _split_long_words(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        cuts = [0, *(word.end() for word in LONG_WORD.finditer(text)), len(text)]
        yield from (text[start:end] for start, end in pairwise(cuts))


def train_sentencepiece(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A SentencePiece unigram model with byte fallback, lossless on any text. Holds the text in memory."""
    _require_vocab_size(vocab_size, BYTES + len(TEXT_TOKENS) + 2)
    model, problems = io.BytesIO(), list[DataError]()

    def lines() -> Iterator[str]:
        try:
            yield from _lines(texts)
        except DataError as error:  # SentencePiece raises a RuntimeError instead
            problems.append(error)
            raise

    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines(),
            model_writer=model,
            model_type="unigram",
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            eos_id=0,
            eos_piece=TEXT_TOKENS[0],
            pad_id=1,
            pad_piece=TEXT_TOKENS[1],
            unk_id=2,
            bos_id=-1,
            minloglevel=2,
        )
    except RuntimeError as error:
        message = f"a vocabulary of {vocab_size} ids must fit the text, but does not ({error})."
        raise next(iter(problems), DataError(message)) from None
    return from_sentencepiece(model.getvalue())


TRAINERS: dict[str, Callable[..., Tokenizer]] = {
    "bpe": train_bpe,
    "multilingual": train_multilingual,
    "wordpiece": train_wordpiece,
    "sentencepiece": train_sentencepiece,
}


def add_encoder_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """Adds `[CLS]`, `[SEP]` and `[MASK]` after all other ids, unless the vocabulary has them. In place.

    An encoder must never mask with the padding token: it would learn that padding stands for words.
    """
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in ENCODER_TOKENS])
    return set_mask_lstrip(tokenizer)


def set_mask_lstrip(tokenizer: Tokenizer, mask: str = ENCODER_TOKENS[-1]) -> Tokenizer:
    """Lets the mask token take the space before it, as RoBERTa's does, if that space would be a token of its own: a
    mask then stands for a word with its space. In place."""
    apart, together = (tokenizer.encode(text, add_special_tokens=False).ids for text in (f"a {mask}", f"a{mask}"))
    if apart != together:
        tokenizer.add_special_tokens([AddedToken(mask, lstrip=True, normalized=False, special=True)])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, path: str | Path) -> None:
    """Writes `tokenizer.json` whole or not at all."""
    write_atomically(Path(path), tokenizer.to_str(pretty=True).encode())


def sample_texts(
    inputs: Sequence[str | Path],
    *,
    selection: Selection | None = None,
    max_bytes: float | None = None,
    skip_broken: bool = False,
    progress: ProgressBar = NO_PROGRESS,
) -> Iterator[str]:
    """The documents of all inputs; with `max_bytes` only the first of each input, up to that many bytes altogether.
    `selection`: which records, and which of their keys (by default all, and `text`).

    `max_bytes` is divided among the files by their size on disk, or evenly if one size is unknown (standard
    input); each gives at least one document, and is read no further than needed. DataError without any document.
    """
    items, is_empty = find_inputs(inputs), True
    total = total_bytes(items)
    progress.start(total)
    for item in items:
        share = 1 / len(items) if total is None else item.bytes / max(total, 1)
        budget = None if max_bytes is None else max_bytes * share
        text_bytes = reported_bytes = 0
        for chunk in item.chunks(selection or Selection()):
            previous_bytes = text_bytes
            parsed = chunk.parse()
            for text in parsed.texts if skip_broken else parsed.require_texts():
                if budget is not None and text_bytes and text_bytes >= budget:
                    break
                yield text
                is_empty = False
                text_bytes += len(text.encode())
            progress.advance(chunk.disk_bytes, text_bytes - previous_bytes)
            reported_bytes += chunk.disk_bytes
            if budget is not None and text_bytes >= budget:
                break
        progress.advance(max(0, item.bytes - reported_bytes), 0)  # standard input has 0
    if is_empty:
        raise DataError(f"`{', '.join(map(str, inputs))}` must have text, but not one document has any.")


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """Lines short enough for SentencePiece, cut at spaces where a line is longer."""
    for line in (line for text in texts for line in text.splitlines()):
        if len(line.encode()) <= MAX_LINE_BYTES:
            yield line
        else:
            yield from re.findall(r"(?:\s*\S{1,50}){1,20}", line)


def _require_vocab_size(vocab_size: int, min_size: int) -> None:
    if vocab_size < min_size:
        raise FieldError("vocab_size", f"be at least {min_size} for this type of tokenizer", got=vocab_size)
    if vocab_size >= 2**31:
        raise FieldError("vocab_size", f"be below {2**31:,}", got=f"{vocab_size:,}")


# Adds tokens to a byte-level BPE tokenizer, for languages that it splits into too many pieces. Training continues where
# it ended: the tokenizer encodes the words of the new text, and pairs of its tokens are merged. As a trainer merges
# characters, each token is written as one character, its *letter*.

MIN_PAIR_COUNT = 2
"""A pair that occurs less often is not merged."""
_BATCH_TEXTS = 64
_SPARE_MERGES = 64
"""Merges that are learned beyond those needed: some make tokens that exist already."""
_FIRST_LETTER, _SURROGATES, _END_LETTER = 0x21, range(0xD800, 0xE000), 0x110000


def extend(tokenizer: Tokenizer, texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Adds to a tokenizer the most frequent merges of its tokens in `texts`, up to `vocab_size` ids.

    Old ids stay, and old merges come first: text without new tokens is encoded as before. The vocabulary is smaller
    than requested if the text has too few distinct pieces. DataError for another type of tokenizer, and for text that
    yields no new token.
    """
    content = json.loads(tokenizer.to_str())
    if content["model"]["type"] != "BPE" or "ByteLevel" not in json.dumps(content["pre_tokenizer"]):
        raise DataError("a tokenizer to extend with text must be byte-level BPE, but is not; train a new one.")
    ids = tokenizer.get_vocab(with_added_tokens=True)
    size = max(ids.values()) + 1
    if vocab_size <= size:
        raise FieldError("vocab_size", f"be above that of the tokenizer to extend ({size:,})", got=f"{vocab_size:,}")
    letters_V, new_ids = _letters(size), vocab_size - size
    words = _encode_as_letters(tokenizer, texts, letters_V)
    merges = _learn_merges(words, letters_V, new_ids + new_ids // 8 + _SPARE_MERGES)
    _append_merges(content["model"], ids, merges, vocab_size)
    if len(content["model"]["vocab"]) == len(ids):
        need = f"pieces that occur {MIN_PAIR_COUNT} times to be new tokens"
        raise DataError(f"the text must have {need}, but has none; add text.")
    return Tokenizer.from_str(json.dumps(content))


def _letters(size: int) -> Array:
    """uint32 [size]: a character for each id, increasing; never a space or a surrogate."""
    letters = np.arange(_FIRST_LETTER, _FIRST_LETTER + size, dtype=np.uint32)
    letters[letters >= _SURROGATES.start] += len(_SURROGATES)
    if letters[-1] >= _END_LETTER:
        limit = _END_LETTER - len(_SURROGATES) - _FIRST_LETTER
        raise FieldError("vocab_size", f"be below {limit:,} to be extended to", got=size)
    return letters


def _encode_as_letters(tokenizer: Tokenizer, texts: Iterable[str], letters_V: Array) -> Iterator[str]:
    """Each text as words, separated by spaces, with a letter for each token."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.model.dropout = None
    rest = iter(texts)
    while batch := list(islice(rest, _BATCH_TEXTS)):
        for encoding in tokenizer.encode_batch(batch, add_special_tokens=False):
            words = np.array([-1 if word is None else word for word in encoding.word_ids], np.int64)
            breaks = np.flatnonzero(np.diff(words)) + 1
            yield np.insert(letters_V[encoding.ids], breaks, ord(" ")).astype("<u4").tobytes().decode("utf-32-le")


def _learn_merges(words: Iterator[str], letters_V: Array, count: int) -> list[tuple[list[int], list[int]]]:
    """Up to `count` merges, in order, each as the old ids of its left and of its right side."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    alphabet = list(letters_V.astype("<u4").tobytes().decode("utf-32-le"))
    trainer = trainers.BpeTrainer(
        vocab_size=len(letters_V) + count, min_frequency=MIN_PAIR_COUNT, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(words, trainer)
    id_by_letter = {letter: id_ for id_, letter in enumerate(alphabet)}
    merges = json.loads(bpe.to_str())["model"]["merges"]
    return [([id_by_letter[c] for c in left], [id_by_letter[c] for c in right]) for left, right in merges]


def _append_merges(
    model: dict[str, Any], ids: dict[str, int], merges: list[tuple[list[int], list[int]]], vocab_size: int
) -> None:
    """Adds merges and their tokens to `model`, up to `vocab_size` ids. Its vocabulary also gets all of `ids`."""
    token_by_id, vocabulary = {id_: token for token, id_ in ids.items()}, dict(ids)
    gaps = max(ids.values()) + 1 - len(ids)
    pairs = dict.fromkeys(tuple(pair) for pair in model["merges"])
    for sides in merges:
        if len(vocabulary) + gaps == vocab_size:
            break
        left, right = ("".join(token_by_id[id_] for id_ in side) for side in sides)
        pairs[left, right] = None  # an existing pair keeps its position
        vocabulary.setdefault(left + right, len(vocabulary) + gaps)
    model["merges"], model["vocab"] = [list(pair) for pair in pairs], vocabulary
