"""The tokenizer of an encoder's export frames one text, and two, whatever its special tokens are called."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from megahead.hf.settings import write_encoder_tokenizer
from support.small_checkpoint import small_config


@pytest.mark.parametrize("causal", [False, True])
def test_two_texts_are_closed_by_a_token_with_a_digit_in_it(tmp_path: Path, causal: bool) -> None:
    words = ["[PAD]", "[UNK]", "[C0]", "[S0]", "[M0]", "one", "two"]
    tokenizer = Tokenizer(models.WordLevel({word: id_ for id_, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "source.json"))
    ids = {"cls_token": 2, "sep_token": 3, "mask_token": 4}
    model = {"family": "modernbert", "is_causal": causal}
    config = small_config(model=model, data={"end_token": 3}, masking=ids)
    write_encoder_tokenizer(tmp_path / "source.json", tmp_path, config)
    written = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    closing = [] if causal else [3]
    assert written.encode("one").ids == [2, 5, *closing]
    pair = written.encode("one", "two")
    assert (pair.ids, pair.type_ids) == ([2, 5, 3, 6, *closing], [0, 0, 0, 1, *(1 for _ in closing)])
