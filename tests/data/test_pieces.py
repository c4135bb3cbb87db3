"""A long text tokenized in pieces has the ids it has in one."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest

from megahead.data import tokenizer as pieces_module
from megahead.data.tokenizer import Tokenizer, split_text
from megahead.data.train_tokenizer import save_tokenizer, train_bpe, train_sentencepiece, train_wordpiece

TEXT = "".join(
    f"Line {k},  of   tea:\n\n\tthe dög's {k * k} cats\r\nsat — on 語 mats.\n  And{' and' * (k % 7)} so on!"
    for k in range(400)
)


@pytest.fixture(params=[train_bpe, train_wordpiece, train_sentencepiece])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    save_tokenizer(request.param([TEXT], 300), tmp_path / "t.json")
    return Tokenizer(tmp_path / "t.json")


def test_pieces_have_the_ids_of_the_whole(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    (whole,) = tokenizer.encode_batch([TEXT])
    monkeypatch.setattr(pieces_module, "SEGMENT_CHARACTERS", 500)
    parts = list(split_text(TEXT, tokenizer.encode_batch))
    assert "".join(parts) == TEXT
    assert len(parts) > len(TEXT) / 1500
    assert list(chain(*tokenizer.encode_batch(parts))) == whole


def test_a_text_that_cannot_be_cut_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces_module, "SEGMENT_CHARACTERS", 100)

    def encode(texts: list[str]) -> list[list[int]]:  # every text begins with a mark: no cut is exact
        return [[0, *map(ord, text)] for text in texts]

    assert list(split_text("a word " * 100, encode)) == ["a word " * 100]
    assert list(split_text("a" * 1000, lambda texts: [list(map(ord, text)) for text in texts])) == ["a" * 1000]
    assert list(split_text("", encode)) == []


def test_long_texts_between_short_ones(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["A cat", TEXT, "on mats"]
    monkeypatch.setattr(pieces_module, "SEGMENT_CHARACTERS", 1000)
    monkeypatch.setattr("megahead.data.tokenizer.SEGMENT_CHARACTERS", 1000)
    ids, lengths = tokenizer.encode_flat(texts)
    monkeypatch.undo()
    assert ids.tolist() == list(chain(*tokenizer.encode_batch(texts)))
    assert lengths.tolist() == [len(part) for part in tokenizer.encode_batch(texts)]
