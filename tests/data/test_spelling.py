"""What tokens stand for: the same bytes from byte-level BPE, WordPiece and SentencePiece."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from megahead.data.train_tokenizer import TRAINERS, add_encoder_tokens, save_tokenizer
from megahead.data.vocabulary_map import SpelledVocabulary
from megahead.errors import DataError
from support.vocabularies import TEXT, vocabulary


@pytest.mark.parametrize("kind", TRAINERS)
def test_a_words_tokens_have_its_bytes_and_the_space_in_front(tmp_path: Path, kind: str) -> None:
    opened = vocabulary(tmp_path, kind)
    for text in (" the cat saw", " the naïve dog, the mat"):
        (ids,) = opened.tokenizer.encode_batch([text])
        assert b"".join(opened.text[id_] or b"?" for id_ in ids) == text.encode()
    assert b" the" in opened.text


def test_bytes_to_fall_back_on_are_bytes_and_ideographs_stand_alone(tmp_path: Path) -> None:
    sentencepiece, wordpiece = vocabulary(tmp_path, "sentencepiece"), vocabulary(tmp_path, "wordpiece")
    assert sentencepiece.text[sentencepiece.spellings.index("<0xE7>")] == b"\xe7"
    assert vocabulary(tmp_path, "bpe").text.count(b"\xe7") == 1
    assert wordpiece.text[wordpiece.spellings.index("猫")] == "猫".encode()
    assert wordpiece.text[wordpiece.spellings.index(",")] == b","
    assert wordpiece.text[wordpiece.spellings.index("##t")] == b"t"


def test_special_tokens_have_roles_and_no_bytes(tmp_path: Path) -> None:
    wordpiece, bpe = vocabulary(tmp_path, "wordpiece"), vocabulary(tmp_path, "bpe")
    assert [wordpiece.in_role(role) for role in ("padding", "unknown", "begin", "end", "mask")] == [0, 1, 2, 3, 4]
    assert [bpe.in_role(role) for role in ("end", "padding", "mask")] == [0, 1, None]
    assert (bpe.text[:2], wordpiece.text[:5]) == ([None] * 2, [None] * 5)
    sentencepiece = vocabulary(tmp_path, "sentencepiece")
    assert sentencepiece.text[sentencepiece.spellings.index("<unk>")] is None


def test_tokens_that_were_added_as_plain_text_are_text(tmp_path: Path) -> None:
    tokenizer = TRAINERS["bpe"](TEXT, 300)
    tokenizer.add_tokens(["  ĠĠ"])
    add_encoder_tokens(tokenizer)
    save_tokenizer(tokenizer, tmp_path / "added.json")
    opened = SpelledVocabulary.open(tmp_path / "added.json")
    assert opened.text[opened.spellings.index("  ĠĠ")] == "  ĠĠ".encode()
    assert opened.in_role("mask") == opened.tokenizer.id_of("[MASK]")


def test_published_tokenizers(shared_data: Path) -> None:
    cased = SpelledVocabulary.open(shared_data / "tokenizers/bert-base-multilingual-cased-tokenizer.json")
    neox = SpelledVocabulary.open(shared_data / "tokenizers/20B_tokenizer.json")
    assert (len(cased.text), len(neox.text)) == (119_547, 50_277)
    assert {b" the", b"ing", b","} <= {*cased.text} & {*neox.text}
    assert "猫".encode() in cased.text
    assert (cased.in_role("mask"), neox.in_role("end")) == (103, 0)


def test_other_spellings_are_refused(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"the": 0, "[UNK]": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "words.json"))
    with pytest.raises(
        DataError, match=r"words\.json` must spell tokens as byte-level BPE, WordPiece or SentencePiece"
    ):
        SpelledVocabulary.open(tmp_path / "words.json")
