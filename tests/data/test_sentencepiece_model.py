"""The tokenizer.json that stands for a SentencePiece model gives its ids; a model that has none is refused."""

from __future__ import annotations

import io
import json
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import zstandard

from megahead.data.tokenizer import Tokenizer, is_sentencepiece, tokenizer_json
from megahead.data.train_tokenizer import save_tokenizer, train_sentencepiece
from megahead.errors import DataError
from support.sentencepiece_models import KINDS, sentencepiece_model
from support.vocabularies import TEXT

MORE: dict[str, dict[str, Any]] = {
    "user-defined": {"model_type": "bpe", "user_defined_symbols": ["[MASK]", "<turn>"], "pad_id": 3},
    "no prefix": {"model_type": "bpe", "add_dummy_prefix": False, "allow_whitespace_only_pieces": True},
    "phrases": {"model_type": "bpe", "split_by_whitespace": False},
    "characters": {"model_type": "char"},
}


@cache
def real_texts(shared_data: Path) -> list[str]:
    """Some of each of 19 languages."""
    texts = defaultdict(list)
    with (shared_data / "text/multilingual_19lang.jsonl.zst").open("rb") as file:
        for line in io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(file), encoding="utf-8"):
            row = json.loads(line)
            if len(texts[row["lang"]]) < 20:
                texts[row["lang"]].append(row["text"][:600])
    return [text for some in texts.values() for text in some]


@pytest.mark.parametrize("kind", [*KINDS, *MORE])
def test_ids_on_real_text_of_many_scripts_are_the_librarys(tmp_path: Path, shared_data: Path, kind: str) -> None:
    real, settings = real_texts(shared_data), {"character_coverage": 0.99, **(KINDS | MORE)[kind]}
    path = sentencepiece_model(tmp_path / "my.model", real[::2], 2500, **settings)
    library = sentencepiece.SentencePieceProcessor(model_file=str(path))
    texts = [*real[1::2], *(f"{text[:40]} [MASK]\t<turn>  {text[40:90]} " for text in real[1::2])]
    made = tokenizer_json(path)
    encoded = [encoding.ids for encoding in made.encode_batch(texts, add_special_tokens=False)]
    assert encoded == library.encode(texts)
    known = [ids for ids in encoded if library.unk_id() not in ids]  # decoded as ` ⁇ `
    assert [made.decode(ids) for ids in known] == library.decode(known)
    assert known


@pytest.mark.parametrize(
    "settings",
    [
        {"treat_whitespace_as_suffix": True},
        {"model_type": "word"},
        {"normalization_rule_name": "nmt_nfkc_cf", "byte_fallback": True},
    ],
)
def test_a_model_that_no_tokenizer_json_stands_for_is_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    path = sentencepiece_model(tmp_path / "my.model", TEXT, **settings)
    with pytest.raises(DataError, match=r"`.*my\.model` must give the ids of a tokenizer\.json .* but does not on '"):
        tokenizer_json(path)


def test_a_model_is_known_by_its_content_whatever_it_is_named(tmp_path: Path) -> None:
    for kind, settings in KINDS.items():
        model = sentencepiece_model(tmp_path / f"{kind}.json", TEXT, **settings)
        assert is_sentencepiece(model)
        assert Tokenizer(model).engine == "sentencepiece"
    save_tokenizer(train_sentencepiece(TEXT, 400), tmp_path / "t.json")
    (tmp_path / "lines.json").write_text("\n\n\n" + (tmp_path / "t.json").read_text())
    assert not is_sentencepiece(tmp_path / "t.json")
    assert Tokenizer(tmp_path / "lines.json").engine == "tokenizers"
