"""Trains a tokenizer on text: byte-level BPE (also for many scripts), WordPiece or SentencePiece, each written as a
`tokenizer.json`.

Some ids are fixed, as other code relies on them: `<|endoftext|>` is 0 and `<|padding|>` 1, in a multilingual BPE
`[CLS]`, `[SEP]` and `[MASK]` 2 to 4; in WordPiece BERT's five special tokens are 0 to 4. If the text has too few
distinct pieces, the vocabulary is smaller than asked for.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from megahead.corpus.progress import ByteProgress, Silent
from megahead.corpus.selection import Selection
from megahead.corpus.sentencepiece_model import from_sentencepiece
from megahead.corpus.sources import find_inputs, total_bytes
from megahead.errors import DataError, FieldError
from megahead.files import write_atomically

TEXT_TOKENS = ("<|endoftext|>", "<|padding|>")
BERT_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ENCODER_TOKENS = ("[CLS]", "[SEP]", "[MASK]")
BYTES = 256
WORDS = r"[^\r\n\p{L}\p{M}\p{N}]?[\p{L}\p{M}]+|\p{N}{1,3}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""What no token of a multilingual vocabulary reaches beyond: letters with their marks, three digits, signs, space.
GPT-2's has no marks, and so cuts each word of Hindi, Bengali, Telugu or Thai at its vowel signs."""
MAX_LINE_BYTES = 4000  # SentencePiece drops sentences of more than 4,192 bytes


def train_bpe(texts: Iterable[str], vocab_size: int, *, show_progress: bool = False) -> Tokenizer:
    """Byte-level BPE as GPT-2 has it, lossless on any text: no normalization, and all 256 bytes are tokens."""
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return _byte_level(texts, vocab_size, words, TEXT_TOKENS, 0, show_progress)


def train_multilingual(texts: Iterable[str], vocab_size: int, *, show_progress: bool = False) -> Tokenizer:
    """The same for many scripts and large vocabularies: words are cut as WORDS says, and no token is made of what
    occurs only once, of which nothing could be learned. Encoders' tokens are 2 to 4, however many ids the text gives.
    """
    words = pre_tokenizers.Split(Regex(WORDS), "isolated")
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    both, special = pre_tokenizers.Sequence([words, spelled]), (*TEXT_TOKENS, *ENCODER_TOKENS)
    return _byte_level(texts, vocab_size, both, special, 2, show_progress)


def _byte_level(
    texts: Iterable[str],
    vocab_size: int,
    words: pre_tokenizers.PreTokenizer,
    special: Sequence[str],
    least: int,
    show_progress: bool,
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
        show_progress=show_progress,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def train_wordpiece(
    texts: Iterable[str], vocab_size: int, *, lowercase: bool = False, show_progress: bool = False
) -> Tokenizer:
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
        show_progress=show_progress,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def train_sentencepiece(texts: Iterable[str], vocab_size: int, *, show_progress: bool = False) -> Tokenizer:
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
            minloglevel=0 if show_progress else 2,
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
    progress: ByteProgress | None = None,
) -> Iterator[str]:
    """The documents of all inputs; with `max_bytes` only the first of each input, up to that many bytes altogether.

    `max_bytes` is divided among the files by their size on disk, or evenly where that of one is not known (standard
    input); each gives at least one document, and is read no further than needed. DataError if none has one.
    """
    progress = progress or Silent()
    found, some = find_inputs(inputs), False
    total = total_bytes(found)
    progress.begin(total)
    for item in found:
        share = 1 / len(found) if total is None else item.bytes / max(total, 1)
        budget = None if max_bytes is None else max_bytes * share
        taken = reported_bytes = 0
        for chunk in item.chunks(selection or Selection()):
            before = taken
            for text in chunk.parse().strict():
                if budget is not None and taken and taken >= budget:
                    break
                yield text
                some = True
                taken += len(text.encode())
            progress.advance(chunk.consumed, taken - before)
            reported_bytes += chunk.consumed
            if budget is not None and taken >= budget:
                break
        progress.advance(item.bytes - reported_bytes, 0)
    if not some:
        raise DataError(f"`{', '.join(map(str, inputs))}` must have text, but not one document has any.")


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """Lines short enough for SentencePiece, cut at spaces where a line is longer."""
    for text in texts:
        for line in text.splitlines():
            yield from (line,) if len(line.encode()) <= MAX_LINE_BYTES else _pieces(line)


def _pieces(line: str) -> Iterator[str]:
    words = iter(re.findall(r"\s*\S{1,50}", line))
    while some := "".join(islice(words, 20)):
        yield some


def _check_room(vocab_size: int, min_size: int) -> None:
    if vocab_size < min_size:
        raise FieldError("vocab_size", f"be at least {min_size} for this type of tokenizer", got=vocab_size)
