"""A tokenizer that is extended with text keeps its ids, and goes on merging where its training ended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from megahead.data.tokenizer import load_tokenizer
from megahead.data.train_tokenizer import (
    _letters,
    add_encoder_tokens,
    extend,
    save_tokenizer,
    train_bpe,
    train_multilingual,
    train_wordpiece,
)
from megahead.data.vocabulary_map import ByteVocabulary, map_vocabulary
from megahead.errors import DataError, FieldError
from support.vocabularies import GERMAN, TEXT

HINDI = [f"{one} विद्यालय में {other} पढ़ते हैं।" for one in ("बच्चे", "लड़के") for other in ("हिन्दी", "विज्ञान", "गणित")] * 3


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def test_ids_stay_and_the_text_takes_fewer_tokens() -> None:
    old = add_encoder_tokens(train_bpe(TEXT, 320))  # three ids behind those of the model
    new = extend(old, HINDI, 350)
    assert new.get_vocab_size() == 350
    assert old.get_vocab(True).items() <= new.get_vocab(True).items()
    assert sorted(new.get_vocab(True).values()) == [*range(350)]
    assert [ids(new, text) for text in TEXT] == [ids(old, text) for text in TEXT]
    assert len(ids(new, HINDI[0])) < 0.6 * len(ids(old, HINDI[0]))
    strange = "naïve[MASK] \t<|endoftext|> 語 है"
    assert new.decode(ids(new, strange), skip_special_tokens=False) == strange
    assert old.token_to_id("[MASK]") in ids(new, strange)


@pytest.mark.parametrize("train", [train_bpe, train_multilingual])
def test_going_on_with_the_same_text_is_longer_training(train: Callable[..., Tokenizer]) -> None:
    texts = [*TEXT, *GERMAN]
    whole, parts = train(texts, 360), extend(train(texts, 300), texts, 360)
    assert parts.get_vocab() == whole.get_vocab()
    assert [ids(parts, text) for text in texts] == [ids(whole, text) for text in texts]


def test_dropout_of_the_old_tokenizer_does_not_change_what_is_learned() -> None:
    old, dropping = train_bpe(TEXT, 300), train_bpe(TEXT, 300)
    dropping.model.dropout = 0.9
    expected, extended = extend(old, GERMAN, 315), extend(dropping, GERMAN, 315)
    assert extended.get_vocab() == expected.get_vocab()
    assert extended.model.dropout == pytest.approx(0.9)  # stays in the file


def test_it_goes_on_as_a_file(tmp_path: Path) -> None:
    save_tokenizer(extend(train_bpe(TEXT, 300), GERMAN, 315), tmp_path / "t.json")
    tokenizer = load_tokenizer(tmp_path / "t.json", probe=GERMAN)
    assert tokenizer.vocab_size == 315
    assert tokenizer.decode(tokenizer.encode_batch([GERMAN[0]])[0]) == GERMAN[0]
    twice = extend(Tokenizer.from_file(str(tmp_path / "t.json")), HINDI, 350)
    assert twice.get_vocab_size() == 350


def test_a_model_keeps_its_rows_and_each_new_token_has_pieces(tmp_path: Path) -> None:
    old = add_encoder_tokens(train_bpe(TEXT, 300))
    save_tokenizer(old, tmp_path / "old.json")
    save_tokenizer(extend(old, [*TEXT, *GERMAN], 330), tmp_path / "new.json")
    before, after = (ByteVocabulary.open(tmp_path / f"{name}.json") for name in ("old", "new"))
    found = map_vocabulary(before, after, {})
    assert found.old_ids[:303] == [*range(303)]
    assert found.old_ids[303:] == [None] * 27
    assert all(len(pieces) > 1 for pieces in found.old_pieces[303:])


def test_what_cannot_be_extended_is_refused() -> None:
    with pytest.raises(DataError, match="must be byte-level BPE"):
        extend(train_wordpiece(TEXT, 80), TEXT, 100)
    with pytest.raises(FieldError, match=r"`vocab_size` must be above .* \(300\), but is 300"):
        extend(train_bpe(TEXT, 300), TEXT, 300)
    with pytest.raises(DataError, match="must have pieces that occur 2 times to be new tokens, but has none"):
        extend(train_bpe(TEXT, 300), ["once"], 310)
    with pytest.raises(FieldError, match="must be below"):
        _letters(1_200_000)


def test_letters_are_characters_that_no_space_is_among() -> None:
    letters = [chr(code) for code in _letters(60_000)]
    assert letters == sorted(letters)
    assert len(set(letters)) == 60_000
    assert " " not in letters
    assert "".join(letters).encode().decode() == "".join(letters)
