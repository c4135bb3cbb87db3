"""Two engines, one result."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from megahead.data import tokenizer as tokenizer_module
from megahead.data.tokenizer import Tokenizer, load_tokenizer
from megahead.data.train_tokenizer import TRAINERS, save_tokenizer, train_sentencepiece, train_wordpiece
from megahead.errors import DataError, UserError

TEXTS = ["The cat", "", "語 of tea<|endoftext|>\n\n  x", "dög " * 50]


def test_both_engines_give_the_same_ids(tokenizer_path: Path) -> None:
    reference, fast = Tokenizer(tokenizer_path), Tokenizer(tokenizer_path, "fastokens")
    assert fast.encode_batch(TEXTS) == reference.encode_batch(TEXTS)
    assert reference.encode_batch([]) == fast.encode_batch([]) == []
    for tokenizer in (reference, fast):
        ids, lengths = tokenizer.encode_flat(TEXTS)
        assert lengths.tolist() == [len(part) for part in reference.encode_batch(TEXTS)]
        assert ids.tolist() == [token for part in reference.encode_batch(TEXTS) for token in part]
        assert [tokenizer.decode(part) for part in tokenizer.encode_batch(TEXTS)] == TEXTS
        assert tokenizer.vocab_size == 280
        assert tokenizer.id_of("<|endoftext|>") == 0


def test_the_fast_engine_is_chosen_when_it_is_exact(tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_tokenizer(tokenizer_path).engine == "tokenizers"
    assert load_tokenizer(tokenizer_path, TEXTS).engine == "fastokens"
    exact = Tokenizer.encode_flat
    monkeypatch.setattr(
        tokenizer_module.Tokenizer, "encode_flat", lambda self, texts: exact(self, [t.upper() for t in texts])
    )
    assert load_tokenizer(tokenizer_path, TEXTS).engine == "tokenizers"


@pytest.mark.parametrize("vocab_size", [7, 60, 301, 600])
@pytest.mark.parametrize("train", TRAINERS.values(), ids=TRAINERS)
def test_a_vocabulary_has_no_more_ids_than_asked_for(train: Callable[..., Any], vocab_size: int) -> None:
    """Though the text has more characters than that."""
    letters, draw = [chr(number) for number in range(0x400, 0x4C0)], random.Random(0)
    texts = [" ".join("".join(draw.choices(letters, k=5)) for _ in range(200)) for _ in range(30)]
    is_small = train is not train_wordpiece and vocab_size < (600 if train is train_sentencepiece else 300)
    with pytest.raises(UserError, match="must") if is_small else nullcontext():
        assert train(texts, vocab_size).get_vocab_size() <= vocab_size


@pytest.mark.parametrize("train", TRAINERS.values(), ids=TRAINERS)
def test_an_error_of_the_text_is_told_as_it_is(train: Callable[..., Any]) -> None:
    def texts() -> Iterator[str]:
        yield "the cat sat on the mat " * 300
        raise DataError("`text.jsonl:2` must be JSON")

    with pytest.raises(DataError, match=r"text\.jsonl:2` must be JSON"):
        train(texts(), 300)


def test_wordpiece_falls_back_to_the_reference(tmp_path: Path) -> None:
    save_tokenizer(train_wordpiece(["the cat sat on the mat"] * 5, 60), tmp_path / "t.json")
    tokenizer = load_tokenizer(tmp_path / "t.json", ["the cat"])
    assert tokenizer.engine == "tokenizers"
    assert tokenizer.id_of("[SEP]") not in tokenizer.encode_batch(["the cat"])[0]


def test_says_what_is_wrong_with_a_file(tmp_path: Path, tokenizer_path: Path) -> None:
    with pytest.raises(DataError, match="there is none"):
        load_tokenizer(tmp_path / "missing.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DataError, match="cannot be read as one"):
        load_tokenizer(tmp_path / "bad.json")
    with pytest.raises(DataError, match=r"must have a token `\[MASK\]`"):
        load_tokenizer(tokenizer_path).id_of("[MASK]")


def test_an_added_token_that_engines_number_differently_is_left_to_the_reference(
    tokenizer_path: Path, tmp_path: Path
) -> None:
    """One whose id leaves a gap, which `tokenizers` closes; no text of the probe has it."""
    content = json.loads(tokenizer_path.read_text())
    token = content["added_tokens"][0] | {"id": len(content["model"]["vocab"]) + 100, "content": "<far>"}
    content["added_tokens"].append(token)
    (tmp_path / "gap.json").write_text(json.dumps(content))
    chosen = load_tokenizer(tmp_path / "gap.json", ["The cat"])
    reference = Tokenizer(tmp_path / "gap.json", "tokenizers")
    assert chosen.encode_batch(["a <far>"]) == reference.encode_batch(["a <far>"])


@pytest.mark.parametrize("engine", ["tokenizers", "fastokens"])
def test_an_empty_text_beside_one_that_is_encoded_in_segments_has_no_ids(
    tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch, engine: tokenizer_module.Engine
) -> None:
    monkeypatch.setattr(tokenizer_module, "SEGMENT_CHARACTERS", 300)
    ids, lengths = tokenizer_module.Tokenizer(tokenizer_path, engine).encode_flat(["", "A cat had tea. " * 90, ""])
    assert lengths.tolist() == [0, len(ids), 0]


UNKNOWN: list[tokenizers.models.Model] = [
    tokenizers.models.WordPiece({"<|endoftext|>": 0, "cat": 1}),
    tokenizers.models.Unigram([("<|endoftext|>", 0.0), ("cat", -1.0)]),
]


@pytest.mark.parametrize("model", UNKNOWN)
def test_a_character_without_a_token_is_told(tmp_path: Path, model: tokenizers.models.Model) -> None:
    tokenizers.Tokenizer(model).save(str(tmp_path / "t.json"))
    tokenizer = load_tokenizer(tmp_path / "t.json", ["cat"])
    with pytest.raises(DataError, match=r"t\.json` must encode any text, but does not \(.*\); give it a token"):
        tokenizer.encode_batch(["cat", "dog"])
