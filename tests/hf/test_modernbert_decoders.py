"""A causal ModernBERT goes out as the decoder of that name, and comes in: with every head, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    ModernBertDecoderConfig,
    ModernBertDecoderForCausalLM,
    ModernBertDecoderModel,
)

from megahead.config.loading import config_from_dict
from megahead.config.model import ModelConfig
from megahead.config.run import RunConfig
from megahead.data.loader import held_out_collator
from megahead.data.train_tokenizer import train_wordpiece
from megahead.errors import UserError
from megahead.evaluate.language_models import open_language_model
from megahead.hf.export import export
from megahead.hf.importing import HFModel, from_hf
from megahead.hf.loading import is_encoder, load_classifier
from megahead.hf.trained import TrainedModel
from megahead.objectives.micro_batch import EvaluationRequest
from support.small_checkpoint import save_small, small_config

HEADS: list[tuple[str, dict[str, Any], bool]] = [
    ("none", {}, False),
    ("tied", {}, False),
    ("pmi", {"temperature": 0.7}, False),
    ("pmi", {}, True),
    ("trained", {"name": "vanilla", "tied": True}, False),
    ("trained", {"name": "vanilla", "temperature": 0.5}, True),
    ("trained", {"name": "vanilla", "output_bias": True}, False),
]
SHAPE = {"vocab_size": 61, "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 3, "intermediate_size": 80}
IDS = {"mask_token": 4, "cls_token": 2, "sep_token": 3}  # as the tokenizer has them


def causal_config(objective: dict[str, Any] | None = None, **model: Any) -> RunConfig:
    shape = {"family": "modernbert", "num_layers": 4, "max_positions": 40, "intermediate_size": 100, "local_window": 8}
    return small_config(
        model={**shape, "is_causal": True, **model}, data={"end_token": 3}, masking=IDS, objective=objective or {}
    )


def write_tokenizer(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    train_wordpiece(["the cat sat on the mat and the dog saw the cat"] * 10, 61).save(str(path))


def save_theirs(folder: Path, kind: Any = ModernBertDecoderForCausalLM, **settings: Any) -> Path:
    """A tiny random model as transformers saves it."""
    torch.manual_seed(0)
    tokens = {"pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}
    tokens |= {"max_position_embeddings": 64, "local_attention": 16}
    model = kind(ModernBertDecoderConfig(**SHAPE | tokens | settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.3).add_(1.0 if "norm" in name else 0.0)
    model.save_pretrained(folder)
    write_tokenizer(folder / "tokenizer.json")
    return folder


@pytest.mark.parametrize(("head", "objective", "keep_padding"), HEADS, ids=str)
def test_an_export_speaks_as_its_checkpoint(tmp_path: Path, head: Any, objective: Any, keep_padding: bool) -> None:
    """Over more tokens than local layers see: one more is one of theirs."""
    config = causal_config(objective, vocab_multiple=256)
    save_small(tmp_path / "run", config)
    folder = export(tmp_path / "run", tmp_path / "out", head, keep_padding=keep_padding).folder
    ours, collator = TrainedModel.open(tmp_path / "run"), held_out_collator(config)
    assert collator is not None
    batch = collator.batch(torch.randint(5, 61, (3, 30), generator=torch.Generator().manual_seed(1)).numpy(), range(3))
    with torch.no_grad():
        hidden = AutoModel.from_pretrained(folder)(batch.input_ids_BT).last_hidden_state
        torch.testing.assert_close(hidden, ours.load().backbone(batch.input_ids_BT), rtol=1e-5, atol=1e-5)
        if head == "none":
            return
        logits = AutoModelForCausalLM.from_pretrained(folder)(batch.input_ids_BT).logits
        scores = ours.load()(EvaluationRequest((batch,), ours.training_free_bias() if head == "pmi" else None))
    loss = F.cross_entropy(logits.flatten(0, 1)[batch.target_index_N], batch.target_ids_N, reduction="sum")
    assert loss.item() == pytest.approx(scores.loss, abs=1e-4 * scores.targets)
    content = json.loads((folder / "config.json").read_text())
    assert (content["local_attention"], content["eos_token_id"]) == (10, 3)
    assert not is_encoder(folder)


@pytest.mark.parametrize(
    ("kind", "settings", "head"),
    [
        (ModernBertDecoderForCausalLM, {}, "trained"),
        (ModernBertDecoderForCausalLM, {"classifier_bias": True, "tie_word_embeddings": False}, "trained"),
        (ModernBertDecoderForCausalLM, {"eos_token_id": 0}, "trained"),
        (ModernBertDecoderModel, {"layer_types": ["full_attention", "sliding_attention"] * 2}, "none"),
    ],
    ids=str,
)
def test_there_and_back_is_bitwise(tmp_path: Path, kind: Any, settings: dict[str, Any], head: Any) -> None:
    theirs = save_theirs(tmp_path / "theirs", kind, **settings)
    back = export(from_hf(theirs, tmp_path / "run"), tmp_path / "back", head).folder
    before, after = (load_file(folder / "model.safetensors") for folder in (theirs, back))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    old, new = (ModernBertDecoderConfig.from_pretrained(folder).to_dict() for folder in (theirs, back))
    untold = ("megahead", "dtype", "_name_or_path", *(["tie_word_embeddings"] if head == "none" else []))
    assert {key: new.get(key) for key in old if key not in untold} == {k: v for k, v in old.items() if k not in untold}


def test_a_published_decoder_may_begin_an_encoder(tmp_path: Path) -> None:
    published = HFModel.open(save_theirs(tmp_path / "theirs"))
    theirs = ModelConfig(**published.model_settings())
    assert (theirs.is_causal, theirs.local_window) == (True, 14)
    published.require_same_architecture(theirs.model_copy(update={"is_causal": False}))


def test_a_prompt_is_framed_on_one_side_and_a_text_is_given_a_probability(tmp_path: Path) -> None:
    save_small(tmp_path / "run", causal_config())
    write_tokenizer(tmp_path / "run/tokenizer.json")
    folder = export(tmp_path / "run", tmp_path / "out", "pmi").folder
    tokenizer = AutoTokenizer.from_pretrained(folder)
    one, two = tokenizer("the cat")["input_ids"], tokenizer("the", "cat")["input_ids"]
    assert one == [2, *tokenizer("the cat", add_special_tokens=False)["input_ids"]]
    assert (two[0], two.count(3), two[-1] != 3) == (2, 1, True)
    logits = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([one])).logits.log_softmax(-1)
    expected = sum(logits[0, at, token].item() for at, token in enumerate(one[1:]))
    (found,) = open_language_model(folder).log_probabilities(["the cat"])
    assert found == pytest.approx(expected, abs=1e-4)


def test_a_classifier_reads_its_last_token(tmp_path: Path) -> None:
    save_small(tmp_path / "run", causal_config())
    folder = export(tmp_path / "run", tmp_path / "out", "none").folder
    classifier, rows = load_classifier(folder, 2, 0), torch.tensor([[2, 5, 6, 3], [2, 5, 3, 0]])
    mask = (rows != 0).long()
    scores = classifier(input_ids=rows, attention_mask=mask).logits
    alone = classifier(input_ids=rows[1:, :3], attention_mask=mask[1:, :3]).logits
    assert scores.shape == (2, 2)
    torch.testing.assert_close(scores[1:], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [None, 2, 5])
def test_a_window_that_ours_cannot_have_is_refused(tmp_path: Path, window: int | None) -> None:
    theirs = save_theirs(tmp_path / "theirs")
    content = json.loads((theirs / "config.json").read_text())
    (theirs / "config.json").write_text(json.dumps({**content, "local_attention": window}))
    with pytest.raises(UserError, match=f"local_attention` must be an even number of at least 4, but is {window}"):
        from_hf(theirs, tmp_path / "run")


def test_a_stale_window_beside_the_one_that_is_read_is_refused(tmp_path: Path) -> None:
    """transformers reads `sliding_window`, where it is given, and not `local_attention`."""
    theirs = save_theirs(tmp_path / "theirs")
    content = json.loads((theirs / "config.json").read_text())
    assert 2 * content["sliding_window"] == content["local_attention"]
    del content["local_attention"]  # 128 by default
    (theirs / "config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="sliding_window` must be 64, half of local_attention, but is "):
        from_hf(theirs, tmp_path / "run")


@pytest.mark.parametrize("head", ["none", "pmi"])
def test_a_causal_bert_is_none_of_transformers(tmp_path: Path, head: Any) -> None:
    tree = causal_config().model_dump(mode="json")
    shape = {"family": "bert", "is_causal": True, "num_layers": 2, "hidden_size": 48, "num_heads": 3, "vocab_size": 61}
    save_small(tmp_path / "run", config_from_dict(tree | {"model": shape}))
    with pytest.raises(UserError) as told:
        export(tmp_path / "run", tmp_path / "out", head)
    assert str(told.value) == (
        "`model.is_causal` must be false in a bert that is exported, but is true instead; a modernbert is exported "
        "either way."
    )
