"""The tokenizer of an encoder's export frames one text, and two, whatever its special tokens are called; a decoder's
adds nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from tokenizers.processors import RobertaProcessing, TemplateProcessing
from transformers import AutoTokenizer

from megahead.data.tokenizer import load_tokenizer
from megahead.data.train_tokenizer import ENCODER_TOKENS, TRAINERS, add_encoder_tokens
from megahead.hf.settings import write_encoder_tokenizer, write_tokenizer
from support.small_checkpoint import save_tokenizer, small_config


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


@pytest.mark.parametrize("earlier", [False, True], ids=["new", "of an earlier version"])
@pytest.mark.parametrize("kind", TRAINERS)
def test_a_spelled_mask_stands_for_a_word_with_its_space_as_in_training(
    tmp_path: Path, kind: str, earlier: bool
) -> None:
    tokenizer = TRAINERS[kind](["the cat sat on the mat and the dog saw the cat"] * 50, 400)
    if earlier:  # its mask token did not take the space
        tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in ENCODER_TOKENS])
    else:
        add_encoder_tokens(tokenizer)
    tokenizer.save(str(tmp_path / "source.json"))
    cls, sep, mask = map(tokenizer.token_to_id, ENCODER_TOKENS)
    masking = {"mask_token": mask, "cls_token": cls, "sep_token": sep}
    config = small_config(model={"family": "bert", "vocab_size": 512}, data={"end_token": sep}, masking=masking)
    write_encoder_tokenizer(tmp_path / "source.json", tmp_path, config)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    the, cat, sat = load_tokenizer(tmp_path / "source.json").encode_batch(["the", " cat", " sat"])
    text = f"the {ENCODER_TOKENS[-1]} sat"
    assert AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"] == [cls, *the, mask, *sat, sep]
    unmasked = tokenizer.encode("the cat sat", add_special_tokens=False).ids
    assert unmasked == [*the, *cat, *sat]
    if not earlier:
        assert tokenizer.encode(text, add_special_tokens=False).ids == [*the, mask, *sat]


OFFSETS = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
FRAMES = {
    "bert": TemplateProcessing(
        single="<|endoftext|> $A <|padding|>", special_tokens=[("<|endoftext|>", 0), ("<|padding|>", 1)]
    ),
    "llama": TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]),
    "roberta": RobertaProcessing(("<|padding|>", 1), ("<|endoftext|>", 0)),
}


@pytest.mark.parametrize("in_sequence", [False, True])
@pytest.mark.parametrize("kind", FRAMES)
def test_a_decoders_tokenizer_adds_no_token_that_training_did_not_see(
    tmp_path: Path, kind: str, in_sequence: bool
) -> None:
    source = tmp_path / "source.json"
    save_tokenizer(source)
    tokenizer = Tokenizer.from_file(str(source))
    tokenizer.post_processor = FRAMES[kind]
    tokenizer.save(str(source))
    content: dict[str, Any] = json.loads(source.read_text())
    if in_sequence:
        content["post_processor"] = {"type": "Sequence", "processors": [OFFSETS, content["post_processor"]]}
        source.write_text(json.dumps(content))
    write_tokenizer(source, tmp_path, small_config(model={"vocab_size": 300}))
    (tmp_path / "config.json").write_text('{"model_type": "gpt_neox"}')
    written = AutoTokenizer.from_pretrained(tmp_path)
    assert [written("the cat")["input_ids"]] == load_tokenizer(source).encode_batch(["the cat"])
    content["post_processor"] = {"type": "Sequence", "processors": [OFFSETS]} if in_sequence else None
    assert json.loads((tmp_path / "tokenizer.json").read_text()) == content
