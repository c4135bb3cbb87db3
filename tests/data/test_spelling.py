"""What tokens stand for: the same bytes from byte-level BPE, WordPiece and SentencePiece."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from megahead.data.train_tokenizer import TRAINERS, add_encoder_tokens, save_tokenizer
from megahead.data.vocabulary_map import ByteVocabulary
from megahead.errors import DataError
from support.vocabularies import TEXT, vocabulary


@pytest.mark.parametrize("kind", TRAINERS)
def test_a_words_tokens_have_its_bytes_and_the_space_in_front(tmp_path: Path, kind: str) -> None:
    opened = vocabulary(tmp_path, kind)
    for text in (" the cat saw", " the naïve dog, the mat"):
        (ids,) = opened.tokenizer.encode_batch([text])
        assert b"".join(opened.token_bytes[id_] or b"?" for id_ in ids) == text.encode()
    assert b" the" in opened.token_bytes


def test_bytes_to_fall_back_on_are_bytes_and_ideographs_stand_alone(tmp_path: Path) -> None:
    sentencepiece, wordpiece = vocabulary(tmp_path, "sentencepiece"), vocabulary(tmp_path, "wordpiece")
    assert sentencepiece.token_bytes[sentencepiece.spellings.index("<0xE7>")] == b"\xe7"
    assert vocabulary(tmp_path, "bpe").token_bytes.count(b"\xe7") == 1
    assert wordpiece.token_bytes[wordpiece.spellings.index("猫")] == "猫".encode()
    assert wordpiece.token_bytes[wordpiece.spellings.index(",")] == b","
    assert wordpiece.token_bytes[wordpiece.spellings.index("##t")] == b"t"


def test_special_tokens_have_roles_and_no_bytes(tmp_path: Path) -> None:
    wordpiece, bpe = vocabulary(tmp_path, "wordpiece"), vocabulary(tmp_path, "bpe")
    assert [wordpiece.id_of_role(role) for role in ("padding", "unknown", "begin", "end", "mask")] == [0, 1, 2, 3, 4]
    assert [bpe.id_of_role(role) for role in ("end", "padding", "mask")] == [0, 1, None]
    assert (bpe.token_bytes[:2], wordpiece.token_bytes[:5]) == ([None] * 2, [None] * 5)
    sentencepiece = vocabulary(tmp_path, "sentencepiece")
    assert sentencepiece.token_bytes[sentencepiece.spellings.index("<unk>")] is None


@pytest.mark.parametrize(
    ("kind", "added", "text"),
    [("bpe", "  ĠĠ", "  ĠĠ"), ("sentencepiece", "covid", "covid"), ("wordpiece", "covid", " covid")],
)
def test_tokens_that_were_added_as_plain_text_are_text(tmp_path: Path, kind: str, added: str, text: str) -> None:
    tokenizer = TRAINERS[kind](TEXT, 400)
    tokenizer.add_tokens([added])
    add_encoder_tokens(tokenizer)
    save_tokenizer(tokenizer, tmp_path / "added.json")
    opened = ByteVocabulary.open(tmp_path / "added.json")
    assert opened.token_bytes[opened.spellings.index(added)] == text.encode()
    assert opened.id_of_role("mask") == opened.tokenizer.id_of("[MASK]")
    assert opened.token_bytes[opened.tokenizer.id_of("[MASK]")] is None


def test_published_tokenizers(shared_data: Path) -> None:
    cased = ByteVocabulary.open(shared_data / "tokenizers/bert-base-multilingual-cased-tokenizer.json")
    neox = ByteVocabulary.open(shared_data / "tokenizers/20B_tokenizer.json")
    assert (len(cased.token_bytes), len(neox.token_bytes)) == (119_547, 50_277)
    assert {b" the", b"ing", b","} <= {*cased.token_bytes} & {*neox.token_bytes}
    assert "猫".encode() in cased.token_bytes
    assert (cased.id_of_role("mask"), neox.id_of_role("end")) == (103, 0)


def test_other_spellings_are_refused(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"the": 0, "[UNK]": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "words.json"))
    with pytest.raises(
        DataError, match=r"words\.json` must spell tokens as byte-level BPE, WordPiece or SentencePiece"
    ):
        ByteVocabulary.open(tmp_path / "words.json")
