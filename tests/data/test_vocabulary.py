"""Tokenizers trained here: their fixed ids, their size, and what they give back."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece

from megahead.data import train_tokenizer as vocabulary
from megahead.data.tokenizer import load_tokenizer
from megahead.data.train_tokenizer import (
    add_encoder_tokens,
    sample_texts,
    save_tokenizer,
    train_bpe,
    train_multilingual,
    train_sentencepiece,
    train_wordpiece,
)
from megahead.errors import DataError, FieldError

TEXTS = [f"A {a} and its {b} went over the {c}, and back.\n\n  Twice!" for a in "xyz" for b in "klm" for c in "uvwé"]
STRANGE = "\x00 naïve 語\t🙂 \r\n  <|endoftext|> end"
HINDI = [f"विद्यालय में {one} पढ़ते हैं" for one in ("बच्चे", "लड़के", "हिन्दी")] * 4


@pytest.mark.parametrize("train", [train_bpe, train_multilingual, train_sentencepiece])
def test_any_text_comes_back(train: Callable[..., vocabulary.Tokenizer], tmp_path: Path) -> None:
    save_tokenizer(train(TEXTS, 290), tmp_path / "t.json")
    tokenizer = load_tokenizer(tmp_path / "t.json")
    assert (tokenizer.id_of("<|endoftext|>"), tokenizer.id_of("<|padding|>")) == (0, 1)
    assert 280 <= tokenizer.vocab_size <= 290
    ids = tokenizer.encode_batch([STRANGE])[0]
    assert tokenizer.decode(ids) == STRANGE
    assert ids.count(0) == 1


def test_wordpiece_has_the_ids_of_bert(tmp_path: Path) -> None:
    save_tokenizer(train_wordpiece(TEXTS, 80), tmp_path / "t.json")
    tokenizer = load_tokenizer(tmp_path / "t.json")
    assert [tokenizer.id_of(token) for token in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")] == [0, 1, 2, 3, 4]
    assert tokenizer.decode(tokenizer.encode_batch(["went over the"])[0]) == "went over the"
    assert tokenizer.encode_batch(["語"]) == [[1]]


def test_sentencepiece_ids_are_the_librarys_own(monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[bytes] = []
    convert = vocabulary.from_sentencepiece
    monkeypatch.setattr(vocabulary, "from_sentencepiece", lambda model: (models.append(model), convert(model))[1])
    converted = train_sentencepiece(TEXTS, 300)
    library = sentencepiece.SentencePieceProcessor(model_proto=models[0])
    for text in [*TEXTS, "two  spaces", " leading", "", "\n", "語 and é"]:
        assert converted.encode(text, add_special_tokens=False).ids == library.encode(text)


def test_encoders_find_their_tokens_in_a_multilingual_vocabulary_of_any_size() -> None:
    for size in (300, 420):
        tokenizer = train_multilingual(HINDI, size)
        assert [tokenizer.token_to_id(f"[{name}]") for name in ("CLS", "SEP", "MASK")] == [2, 3, 4]
        assert add_encoder_tokens(tokenizer).get_vocab_size() == tokenizer.get_vocab_size() <= size


def test_words_with_vowel_signs_become_whole_tokens_of_a_multilingual_vocabulary() -> None:
    cut, whole = (train(HINDI, 420).encode("विद्यालय").tokens for train in (train_bpe, train_multilingual))
    assert len(cut) > 1 == len(whole)


def test_what_occurs_once_is_no_token_of_a_multilingual_vocabulary() -> None:
    once, texts = " unheard", ["met the dog, heard the bird"] * 2
    assert len(train_bpe([*texts, once], 600).encode(once).tokens) == 1
    assert len(train_multilingual([*texts, once], 600).encode(once).tokens) > 1


@pytest.mark.parametrize("train", [train_bpe, train_multilingual, train_sentencepiece, train_wordpiece])
def test_too_small_a_vocabulary_is_refused(train: Callable[..., vocabulary.Tokenizer]) -> None:
    with pytest.raises(FieldError, match="`vocab_size` must be at least"):
        train(TEXTS, 5)


def test_no_text_is_reported() -> None:
    with pytest.raises(DataError, match="must fit the text"):
        train_sentencepiece([], 300)


def test_long_lines_are_learned_from_too() -> None:
    tokenizer = train_sentencepiece([" ".join(TEXTS).replace("\n", " ") * 3], 290)
    assert tokenizer.token_to_id("▁and") is not None


def test_each_file_gives_its_share(json_lines: Callable[..., Path]) -> None:
    files = [json_lines(["a" * 99] * 100, name="big.jsonl"), json_lines(["b" * 99] * 50, name="small.jsonl")]
    texts = list(sample_texts(files, max_bytes=3000))
    assert sum(map(len, texts)) == pytest.approx(3000, abs=200)
    assert sum(text[0] == "a" for text in texts) == pytest.approx(20, abs=1)
    assert len(list(sample_texts(files, max_bytes=1))) == 2
    assert len(list(sample_texts(files))) == 150


def test_standard_input_gives_its_share_though_its_size_is_not_known(
    json_lines: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = json_lines(["b" * 99] * 100, name="small.jsonl")
    for inputs, expected in ((["-"], 30), (["-", file], 15)):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(json_lines(["a" * 99] * 100).read_bytes())))
        texts = list(sample_texts(inputs, max_bytes=3000))
        assert sum(text[0] == "a" for text in texts) == pytest.approx(expected, abs=1)
        assert sum(map(len, texts)) == pytest.approx(3000, abs=200)
