"""Random models as transformers saves them go in and out with equal logits, by the two commands alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    ModernBertConfig,
    ModernBertForMaskedLM,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForMaskedLM,
    XLMRobertaConfig,
    XLMRobertaForMaskedLM,
)

from megahead.commands import convert
from megahead.errors import UserError
from megahead.hf.encoders import roberta_settings
from megahead.hf.loading import context_length, read_context_length

SHAPE = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
MMBERT = {"pad_token_id": 0, "bos_token_id": 2, "mask_token_id": 4}
MMBERT |= dict.fromkeys(("eos_token_id", "cls_token_id", "sep_token_id"), 1)
"""As published: config.json says that a text begins with its end token; the tokenizer knows better."""


def mmbert_tokenizer(folder: Path) -> None:
    """Gemma's special tokens and roles: there is neither a cls nor a sep token."""
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
    names["mask_token"] = "<mask>"
    vocabulary = {text: id_ for id_, text in enumerate([*names.values(), "a", "b"])}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.add_special_tokens([*names.values()])
    template = {"single": "<bos> $A <eos>", "pair": "<bos> $A <eos> $B <eos>"}
    tokenizer.post_processor = TemplateProcessing(**template, special_tokens=[("<bos>", 2), ("<eos>", 1)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)


@dataclass(frozen=True)
class RandomFolder:
    model: Callable[[], Any]
    special_tokens: dict[str, Any] | None = None
    """The masking section of model.yaml: the tokens that the folder names; None for a decoder."""

    dtype: str = "float32"
    shard: str = "1GB"
    write_tokenizer: Callable[[Path], None] | None = None
    options: list[str] = field(default_factory=list)


FOLDERS = {
    "XLM-R": RandomFolder(
        lambda: XLMRobertaForMaskedLM(XLMRobertaConfig(**SHAPE, vocab_size=3_001, type_vocab_size=1)),
        {"cls_token": 0, "sep_token": 2, "special_tokens": [1]},
    ),
    "RoBERTa": RandomFolder(
        lambda: RobertaForMaskedLM(RobertaConfig(**SHAPE, vocab_size=301, type_vocab_size=1)),
        {"cls_token": 0, "sep_token": 2, "special_tokens": [1]},
        dtype="bfloat16",
        shard="20KB",
        options=["--dtype", "bfloat16", "--shard-size", "0.00002"],
    ),
    "ModernBERT": RandomFolder(
        lambda: ModernBertForMaskedLM(ModernBertConfig(**SHAPE, vocab_size=301, pad_token_id=0, local_attention=8)),
        {"special_tokens": []},
    ),
    "mmBERT": RandomFolder(
        lambda: ModernBertForMaskedLM(ModernBertConfig(**SHAPE, vocab_size=3_001, local_attention=8, **MMBERT)),
        {"mask_token": 4, "cls_token": 2, "sep_token": 1, "special_tokens": []},
        write_tokenizer=mmbert_tokenizer,
    ),
    "mmBERT without a tokenizer": RandomFolder(
        lambda: ModernBertForMaskedLM(ModernBertConfig(**SHAPE, vocab_size=301, local_attention=8, **MMBERT)),
        {"mask_token": 4, "cls_token": 2, "sep_token": 1, "special_tokens": []},
    ),
    "GPT-2": RandomFolder(
        lambda: GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=3, n_head=2, vocab_size=301)),
        shard="20KB",
        options=["--shard-size", "0.00002"],
    ),
    "Gemma 3": RandomFolder(
        lambda: Gemma3ForCausalLM(
            Gemma3TextConfig(**SHAPE, vocab_size=301, num_key_value_heads=1, head_dim=8, sliding_window=8)
        ),
    ),
}


def run_convert(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["convert", *map(str, arguments)])
    convert.main()


@pytest.mark.parametrize("name", FOLDERS)
def test_it_goes_in_and_out_with_equal_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    torch.manual_seed(0)
    folder, theirs, run, back = FOLDERS[name], tmp_path / "theirs", tmp_path / "run", tmp_path / "back"
    folder.model().to(getattr(torch, folder.dtype)).save_pretrained(theirs, max_shard_size=folder.shard)
    if folder.write_tokenizer is not None:
        folder.write_tokenizer(theirs)
    run_convert(monkeypatch, "from-hf", "--model", theirs, "--output", run)
    assert yaml.safe_load((run / "model.yaml").read_text()).get("masking") == folder.special_tokens
    run_convert(monkeypatch, "to-hf", "--checkpoint", run, "--output", back, "--head", "trained", *folder.options)
    assert len([*back.glob("*.safetensors")]) == len([*theirs.glob("*.safetensors")])
    auto_class: Any = AutoModelForCausalLM if folder.special_tokens is None else AutoModelForMaskedLM
    ids = torch.randint(5, 300, (2, 40))
    with torch.no_grad():
        before, after = (auto_class.from_pretrained(path, dtype="float32")(ids).logits for path in (theirs, back))
    assert torch.equal(before, after)
    if folder.write_tokenizer is not None:
        one, two = (AutoTokenizer.from_pretrained(path) for path in (theirs, back))
        assert one("ab")["input_ids"] == two("ab")["input_ids"] == [2, 5, 6, 1]


def test_rows_before_the_first_tokens_position_are_no_context(tmp_path: Path) -> None:
    model = RobertaForMaskedLM(RobertaConfig(**SHAPE, vocab_size=301, type_vocab_size=1, max_position_embeddings=66))
    model.save_pretrained(tmp_path)
    assert read_context_length(tmp_path) == context_length(model) == 64
    model(torch.full((1, 64), 5))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"type_vocab_size": 2}, "type_vocab_size` must be 1, but is 2"),
        ({"hidden_act": "gelu_new"}, "hidden_act` must be one of gelu, but is gelu_new"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type` must be absolute"),
        ({"is_decoder": True}, "is_decoder` must be false, but is true"),
        ({"pad_token_id": None}, "pad_token_id` must be an id, after which positions begin, but is None"),
        ({"quantization_config": {}}, "quantization_config` must be missing"),
    ],
    ids=str,
)
def test_what_ours_has_not_is_refused_by_name(change: dict[str, Any], sentence: str) -> None:
    hf_config = RobertaConfig(**SHAPE, vocab_size=301, type_vocab_size=1).to_dict()
    with pytest.raises(UserError, match=sentence):
        roberta_settings({**hf_config, **change}, family="roberta")
