"""One vocabulary's tokens in another's: kept by their bytes or roles, else said by pieces."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from megahead.data.train_tokenizer import TRAINERS, add_encoder_tokens, save_tokenizer
from megahead.data.vocabulary_map import ByteVocabulary, VocabularyMap, map_vocabulary
from support.vocabularies import GERMAN, TEXT, vocabulary


def said(token: int, old: ByteVocabulary, translation: VocabularyMap) -> bytes:
    kept = translation.old_ids[token]
    ids = translation.old_pieces[token] if kept is None else [kept]
    return b"".join(old.token_bytes[id_] or b"?" for id_ in ids)


@pytest.mark.parametrize("kind", TRAINERS)
def test_a_vocabulary_in_itself_is_the_identity(tmp_path: Path, kind: str) -> None:
    one = vocabulary(tmp_path, kind)
    translation = map_vocabulary(one, one, {})
    assert translation.old_ids == list(range(len(one.token_bytes)))
    assert translation.is_permutation()
    assert translation.counts() == (len(one.token_bytes), 0, 0)


@pytest.mark.parametrize(("old_kind", "new_kind"), permutations(TRAINERS, 2))
def test_pieces_have_the_bytes_of_their_token(tmp_path: Path, old_kind: str, new_kind: str) -> None:
    old, new = vocabulary(tmp_path, old_kind), vocabulary(tmp_path, new_kind, 420, GERMAN)
    translation = map_vocabulary(old, new, {})
    kept, pieced, fresh = translation.counts()
    assert kept > 15
    assert pieced > 0
    assert (kept + pieced + fresh, translation.is_permutation()) == (len(new.token_bytes), False)
    for token, text in enumerate(new.token_bytes):
        if text and (translation.old_ids[token] is not None or translation.old_pieces[token]):
            found = said(token, old, translation)
            assert (found.strip() if old_kind == "wordpiece" else found) in (text, text.strip())
    if old_kind == "bpe":  # has all bytes
        assert all(
            translation.old_pieces[token] or kept is not None
            for token, kept in enumerate(translation.old_ids)
            if new.token_bytes[token]
        )


def test_pieces_are_the_old_tokenizers_own(tmp_path: Path) -> None:
    old, new = vocabulary(tmp_path, "bpe"), vocabulary(tmp_path, "wordpiece", 420, GERMAN)
    translation = map_vocabulary(old, new, {})
    hund = new.spellings.index("hund")
    assert translation.old_pieces[hund] == old.tokenizer.encode_batch([" hund"])[0]


def test_parts_of_characters_are_said_by_bytes(tmp_path: Path) -> None:
    """`猫`'s first two bytes, as a byte-level token of their own: no text, for a tokenizer."""
    content = Tokenizer(models.BPE({"ç": 0, "Į": 1, "çĮ": 2}, [("ç", "Į")]))
    content.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    content.save(str(tmp_path / "parts.json"))
    new, old = ByteVocabulary.open(tmp_path / "parts.json"), vocabulary(tmp_path, "sentencepiece")
    translation = map_vocabulary(old, new, {})
    assert new.token_bytes[2] == b"\xe7\x8c"
    assert [old.spellings[id_] for id_ in translation.old_pieces[2]] == ["<0xE7>", "<0x8C>"]


def test_a_tokenizer_without_capitals_says_them_as_it_reads_them(tmp_path: Path) -> None:
    save_tokenizer(TRAINERS["wordpiece"](TEXT, 300, lowercase=True), tmp_path / "lower.json")
    old = ByteVocabulary.open(tmp_path / "lower.json")
    new = vocabulary(tmp_path, "bpe", 330, ["A Cat A Cat A Cat"])
    translation = map_vocabulary(old, new, {})
    cat = new.token_bytes.index(b" Cat")
    assert translation.old_pieces[cat] == [old.spellings.index("cat")]


def test_special_tokens_are_kept_by_spelling_then_by_what_the_model_calls_them_then_by_role(tmp_path: Path) -> None:
    save_tokenizer(add_encoder_tokens(TRAINERS["bpe"](TEXT, 300)), tmp_path / "both.json")
    old, new = ByteVocabulary.open(tmp_path / "both.json"), vocabulary(tmp_path, "wordpiece")
    padding, unknown, begin, end, mask = map_vocabulary(old, new, {}).old_ids[:5]
    by_name = [old.tokenizer.id_of(name) for name in ("<|padding|>", "[CLS]", "[SEP]", "[MASK]")]
    assert [padding, begin, end, mask] == by_name
    assert unknown is None
    bpe = vocabulary(tmp_path, "bpe")
    words = map_vocabulary(bpe, new, {})
    assert words.old_ids[:5] == [1, None, None, 0, None]  # [SEP] ends a text, as <|endoftext|> does
    assert words.old_pieces[:5] == [[]] * 5
    assert map_vocabulary(bpe, new, {"end": 7}).old_ids[3] == 7
