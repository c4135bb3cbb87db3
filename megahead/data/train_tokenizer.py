"""Trains tokenizers, and gives a trained one more tokens."""

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
from megahead.data.sentencepiece_model import from_sentencepiece
from megahead.data.sources import find_inputs, total_bytes
from megahead.data.writer import ByteProgress
from megahead.errors import DataError, FieldError
from megahead.files import write_atomically

# Some ids are fixed, as other code relies on them: `<|endoftext|>` is 0 and `<|padding|>` 1, in a multilingual BPE
# `[CLS]`, `[SEP]` and `[MASK]` 2 to 4; in WordPiece BERT's five special tokens are 0 to 4. If the text has too few
# distinct pieces, the vocabulary is smaller than asked for.

TEXT_TOKENS = ("<|endoftext|>", "<|padding|>")
BERT_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ENCODER_TOKENS = ("[CLS]", "[SEP]", "[MASK]")
BYTES = 256
WORDS = r"[^\r\n\p{L}\p{M}\p{N}]?[\p{L}\p{M}]+|\p{N}{1,3}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""What no token of a multilingual vocabulary reaches beyond: letters with their marks, three digits, signs, space.
GPT-2's has no marks, and so cuts each word of Hindi, Bengali, Telugu or Thai at its vowel signs."""
LONG_WORD = re.compile(r"\w{64}(?=\w)")
"""Training takes time with the square of a word's length: in text without spaces, say, words are cut for it."""
MAX_LINE_BYTES = 4000  # SentencePiece drops sentences of more than 4,192 bytes


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE as GPT-2 has it, lossless on any text: no normalization, and all 256 bytes are tokens."""
    return _byte_level(texts, vocab_size, pre_tokenizers.ByteLevel(add_prefix_space=False), TEXT_TOKENS, 0)


def train_multilingual(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """The same for many scripts and large vocabularies: words are cut as WORDS says, and no token is made of what
    occurs only once, of which nothing could be learned. Encoders' tokens are 2 to 4, however many ids the text gives.
    """
    words = pre_tokenizers.Split(Regex(WORDS), "isolated")
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    both = pre_tokenizers.Sequence([words, spelled])
    return _byte_level(texts, vocab_size, both, (*TEXT_TOKENS, *ENCODER_TOKENS), 2)


def _byte_level(
    texts: Iterable[str], vocab_size: int, words: pre_tokenizers.PreTokenizer, special: Sequence[str], least: int
) -> Tokenizer:
    _check_room(vocab_size, BYTES + len(special))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = words
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=least,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_without_long_words(texts), trainer)
    return tokenizer


def train_wordpiece(texts: Iterable[str], vocab_size: int, *, lowercase: bool = False) -> Tokenizer:
    """WordPiece as BERT uses it; characters rarer than the thousand most frequent become `[UNK]`."""
    _check_room(vocab_size, len(BERT_TOKENS) + 1)
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=list(BERT_TOKENS),
        limit_alphabet=min(1000, vocab_size - len(BERT_TOKENS)),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_without_long_words(texts), trainer)
    return tokenizer


def _without_long_words(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        cuts = [0, *(word.end() for word in LONG_WORD.finditer(text)), len(text)]
        yield from (text[start:end] for start, end in pairwise(cuts))


def train_sentencepiece(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A SentencePiece unigram model with byte fallback, lossless on any text. Holds the text in memory."""
    _check_room(vocab_size, BYTES + len(TEXT_TOKENS) + 2)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_lines(texts),
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
        raise DataError(f"the text must suffice for a vocabulary of {vocab_size}, but does not ({error}).") from None
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
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, path: str | Path) -> None:
    """Writes `tokenizer.json` whole or not at all."""
    write_atomically(Path(path), tokenizer.to_str(pretty=True).encode())


def sample_texts(
    inputs: Sequence[str | Path],
    *,
    selection: Selection | None = None,
    max_bytes: int | None = None,
    skip_broken: bool = False,
    progress: ByteProgress | None = None,
) -> Iterator[str]:
    """The documents of all inputs; with `max_bytes` only the first of each input, up to that many bytes altogether.

    `max_bytes` is divided among the files by their size on disk, or evenly where that of one is not known (standard
    input); each gives at least one document, and is read no further than needed. DataError if none has one.
    """
    progress = progress or ByteProgress()
    found, some = find_inputs(inputs), False
    total = total_bytes(found)
    progress.start(total)
    for item in found:
        share = 1 / len(found) if total is None else item.bytes / max(total, 1)
        budget = None if max_bytes is None else max_bytes * share
        taken = reported_bytes = 0
        for chunk in item.chunks(selection or Selection()):
            before = taken
            parsed = chunk.parse()
            for text in parsed.texts if skip_broken else parsed.strict_texts():
                if budget is not None and taken and taken >= budget:
                    break
                yield text
                some = True
                taken += len(text.encode())
            progress.advance(chunk.disk_bytes, taken - before)
            reported_bytes += chunk.disk_bytes
            if budget is not None and taken >= budget:
                break
        progress.advance(item.bytes - reported_bytes, 0)
    if not some:
        raise DataError(f"`{', '.join(map(str, inputs))}` must have text, but not one document has any.")


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """Lines short enough for SentencePiece, cut at spaces where a line is longer."""
    for line in (line for text in texts for line in text.splitlines()):
        if len(line.encode()) <= MAX_LINE_BYTES:
            yield line
        else:
            yield from re.findall(r"(?:\s*\S{1,50}){1,20}", line)


def _check_room(vocab_size: int, min_size: int) -> None:
    if vocab_size < min_size:
        raise FieldError("vocab_size", f"be at least {min_size} for this type of tokenizer", got=vocab_size)


# Gives a byte-level BPE tokenizer more tokens, for languages that it cuts into too many pieces. Training goes on where
# it ended: words of the new text are cut by the tokenizer, and pairs of its own tokens are merged. Each token is
# written as one character for that, its *letter*, since a trainer merges characters.

MIN_PAIR_COUNT = 2
"""How often a pair must occur: of a token that occurs once nothing is learned."""
_TEXTS_AT_ONCE = 64
_MORE = 64
"""Merges that are learned beyond those wanted: some make tokens that are there already."""
_FIRST, _SURROGATES, _LAST = 0x21, range(0xD800, 0xE000), 0x110000


def extend(tokenizer: Tokenizer, texts: Iterable[str], vocab_size: int) -> Tokenizer:
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
        raise DataError(
            f"the text must have pieces that occur {MIN_PAIR_COUNT} times to be new tokens, but has none; add text."
        )
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
        vocab_size=len(letters_V) + count, min_frequency=MIN_PAIR_COUNT, initial_alphabet=alphabet, show_progress=False
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
