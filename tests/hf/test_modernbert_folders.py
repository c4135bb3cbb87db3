"""Folders of ModernBERT come in and go out: with every head, bit for bit, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    ModernBertConfig,
    ModernBertForMaskedLM,
    ModernBertModel,
)

from megahead.checkpoints.reading import open_checkpoint
from megahead.config.loading import config_from_dict
from megahead.config.run import RunConfig
from megahead.data.loader import held_out_collator
from megahead.data.train_tokenizer import train_wordpiece
from megahead.errors import CheckpointError, UserError
from megahead.hf import encoders, verify
from megahead.hf.export import export
from megahead.hf.importing import from_hf, load_input_embedding
from megahead.hf.trained import TrainedModel
from megahead.objectives.micro_batch import EvaluationRequest
from support.small_checkpoint import save_small, small_config

HEADS: list[tuple[str, dict[str, Any]]] = [
    ("none", {}),
    ("tied", {}),
    ("pmi", {}),
    ("pmi", {"temperature": 0.7}),
    ("trained", {"name": "vanilla", "tied": True}),
    ("trained", {"name": "vanilla", "temperature": 0.5}),
    ("trained", {"vanilla_weight": 0.3, "learned_temperature": True}),
]
SHAPE = {"vocab_size": 61, "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 3, "intermediate_size": 80}


def encoder_config(objective: dict[str, Any] | None = None, **model: Any) -> RunConfig:
    shape = {"family": "modernbert", "num_layers": 4, "max_positions": 40, "intermediate_size": 100, "local_window": 8}
    return small_config(
        model={**shape, **model},
        data={"end_token": 2},
        masking={"mask_token": 3, "cls_token": 1, "sep_token": 2},
        objective=objective or {},
    )


def write_tokenizer(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    train_wordpiece(["the cat sat on the mat and the dog saw the cat"] * 10, 61).save(str(path))


def save_theirs(folder: Path, kind: Any = ModernBertForMaskedLM, shard: str = "1GB", **settings: Any) -> Path:
    """A tiny random model as transformers saves it."""
    torch.manual_seed(0)
    tokens = {"pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}
    model = kind(ModernBertConfig(**SHAPE | {"max_position_embeddings": 64, "local_attention": 16} | tokens | settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.3).add_(1.0 if "norm" in name else 0.0)
    model.save_pretrained(folder, max_shard_size=shard)
    write_tokenizer(folder / "tokenizer.json")
    return folder


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("keep_padding", [False, True])
@pytest.mark.parametrize(("head", "objective"), HEADS, ids=str)
def test_an_export_speaks_as_its_checkpoint(tmp_path: Path, head: Any, objective: Any, keep_padding: bool) -> None:
    config = encoder_config(objective, vocab_multiple=256)
    save_small(tmp_path / "run", config)
    folder = export(tmp_path / "run", tmp_path / "out", head, keep_padding=keep_padding).folder
    ours, collator = TrainedModel.open(tmp_path / "run"), held_out_collator(config)
    assert collator is not None
    batch = collator.batch(torch.randint(4, 61, (3, 30), generator=torch.Generator().manual_seed(1)).numpy(), range(3))
    with torch.no_grad():
        hidden = AutoModel.from_pretrained(folder)(batch.input_ids_BT).last_hidden_state
        torch.testing.assert_close(hidden, ours.load().backbone(batch.input_ids_BT), rtol=1e-5, atol=1e-5)
        if head == "none":
            return
        logits = AutoModelForMaskedLM.from_pretrained(folder)(batch.input_ids_BT).logits
        scores = ours.load()(EvaluationRequest((batch,), ours.training_free_bias() if head == "pmi" else None))
    loss = F.cross_entropy(logits.flatten(0, 1)[batch.target_index_N], batch.target_ids_N, reduction="sum")
    assert loss.item() == pytest.approx(scores.loss, abs=1e-4 * scores.targets)
    assert json.loads((folder / "config.json").read_text())["classifier_bias"] == (head != "trained")


def test_what_a_head_gives_back_is_what_it_was_given_within_what_fp32_rounds(tmp_path: Path) -> None:
    """Also by a norm with its eps: as near as a head without one."""
    errors = {}
    for eps in (1e-5, 1e-12):
        save_small(tmp_path / f"{eps}", encoder_config(norm_eps=eps))
        errors[eps] = export(tmp_path / f"{eps}", tmp_path / f"out{eps}", "tied").parity
    assert errors[1e-5].largest_error["float32"] < 3 * errors[1e-12].largest_error["float32"]


def test_the_check_of_an_export_looks_further_than_local_layers_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here config.json lacks the window, and 64 tokens to each side are seen instead of 128."""
    config = encoder_config(local_window=256, max_positions=400)
    tree = config.model_dump(mode="json")
    config = RunConfig.model_validate({**tree, "data": {**tree["data"], "sequence_length": 400}})
    save_small(tmp_path / "run", config)
    assert export(tmp_path / "run", tmp_path / "out", "none").parity.tokens == 2 * (64 + 256)
    monkeypatch.setattr(verify, "_MAX_LOGITS", 2 * 3 * config.model.vocab_size)
    assert export(tmp_path / "run", tmp_path / "with a head", "tied").parity.tokens == 2 * 3
    monkeypatch.delitem(encoders._MODERNBERT.hf_names, "local_window")
    with pytest.raises(CheckpointError, match="hidden states must be within"):
        export(tmp_path / "run", tmp_path / "out", "none")


@pytest.mark.parametrize(
    ("kind", "settings", "head"),
    [
        (ModernBertForMaskedLM, {}, "trained"),
        (ModernBertForMaskedLM, {"classifier_bias": True, "tie_word_embeddings": False}, "trained"),
        (ModernBertForMaskedLM, {"layer_types": ["full_attention", "sliding_attention"] * 2}, "trained"),
        (ModernBertModel, {"layer_types": ["full_attention"] * 4, "norm_eps": 1e-6}, "none"),
        (ModernBertModel, {"num_hidden_layers": 2, "hidden_activation": "gelu_pytorch_tanh"}, "none"),
    ],
    ids=str,
)
def test_there_and_back_is_bitwise(tmp_path: Path, kind: Any, settings: dict[str, Any], head: Any) -> None:
    transform = {"classifier_activation": settings.get("hidden_activation", "gelu")}
    theirs = save_theirs(tmp_path / "theirs", kind, **settings | transform)
    back = export(from_hf(theirs, tmp_path / "run"), tmp_path / "back", head).folder
    before, after = stored(theirs), stored(back)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    old, new = (ModernBertConfig.from_pretrained(folder).to_dict() for folder in (theirs, back))
    untold = ("megahead", "dtype", "_name_or_path", *(["tie_word_embeddings"] if head == "none" else []))
    for key in untold:
        old.pop(key, None), new.pop(key, None)
    assert {key: new.get(key) for key in old} == old


def test_shards_and_half_precision_come_in_and_go_out(tmp_path: Path) -> None:
    theirs = save_theirs(tmp_path / "theirs")
    halved = {name: tensor.bfloat16() for name, tensor in stored(theirs).items()}
    save_file(halved, theirs / "model.safetensors", metadata={"format": "pt"})
    run = from_hf(theirs, tmp_path / "run")
    back = export(run, tmp_path / "back", "trained", dtype="bfloat16", shard_bytes=20_000).folder
    assert len(list(back.glob("*.safetensors"))) > 2
    assert all(torch.equal(tensor, stored(back)[name]) for name, tensor in halved.items())
    again = export(from_hf(back, tmp_path / "again"), tmp_path / "whole", "trained").folder
    assert all(torch.equal(tensor.float(), stored(again)[name]) for name, tensor in halved.items())


def test_settings_of_older_writers_are_understood(tmp_path: Path) -> None:
    theirs = save_theirs(tmp_path / "theirs", num_hidden_layers=5)
    content = json.loads((theirs / "config.json").read_text())
    for key in ("rope_parameters", "layer_types"):
        content.pop(key)
    content |= {"global_attn_every_n_layers": 2, "global_rope_theta": 80000.0, "local_rope_theta": 70.0}
    (theirs / "config.json").write_text(json.dumps(content))
    model = config_from_dict(open_checkpoint(from_hf(theirs, tmp_path / "run")).config).model
    assert (model.global_every, model.rotary_base, model.local_rotary_base) == (2, 80000.0, 70.0)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"norm_bias": True}, "norm_bias` must be false, but is true"),
        ({"attention_bias": True}, "attention_bias` must be false"),
        ({"mlp_bias": True}, "mlp_bias` must be false"),
        ({"decoder_bias": False}, "decoder_bias` must be true, but is false"),
        ({"hidden_activation": "relu"}, "hidden_activation` must be one of gelu"),
        ({"classifier_activation": "silu"}, "classifier_activation` must be gelu, as hidden_activation, but is silu"),
        ({"mlp_dropout": 0.1}, "mlp_dropout` must be 0.0, as embedding_dropout, but is 0.1"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types` must be full_attention at equal distances"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0}}},
            "rope_parameters.full_attention.rope_type` must be default, but is yarn",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "must be default, but is linear"),
        ({"rope_parameters": None, "local_rope_theta": None}, "local_rope_theta` must be a number, but is None"),
        ({"local_attention": 16, "sliding_window": 2}, "sliding_window` must be 8, half of local_attention, but is 2"),
        ({"quantization_config": {"bits": 4}}, "quantization_config` must be missing"),
        ({"model_type": "modernvbert"}, "model_type` must be one of .*modernbert, .*, but is modernvbert"),
    ],
    ids=str,
)
def test_models_that_ours_cannot_be_are_refused(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    theirs = save_theirs(tmp_path / "theirs")
    content = json.loads((theirs / "config.json").read_text())
    (theirs / "config.json").write_text(json.dumps({**content, **change}))
    with pytest.raises(UserError, match=sentence):
        from_hf(theirs, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "tensor", "sentence"),
    [
        ("model.layers.1.attn.Wqkv.weight", torch.zeros(145, 48), r"Wqkv.weight as \[144, 48\], but has \[145, 48\]"),
        ("model.layers.1.attn.Wk.weight", torch.zeros(48, 48), "tensors of a ModernBERT model only, but is one"),
    ],
)
def test_a_tensor_of_another_shape_or_name_is_refused(
    tmp_path: Path, name: str, tensor: torch.Tensor, sentence: str
) -> None:
    theirs = save_theirs(tmp_path / "theirs")
    save_file(stored(theirs) | {name: tensor}, theirs / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=sentence):
        from_hf(theirs, tmp_path / "run")


def test_the_tokenizer_the_table_and_a_classifier_come_along(tmp_path: Path) -> None:
    config = encoder_config()
    save_small(tmp_path / "run", config)
    write_tokenizer(tmp_path / "run" / "tokenizer.json")
    folder = export(tmp_path / "run", tmp_path / "out", "pmi").folder
    content = json.loads((folder / "config.json").read_text())
    assert [content[f"{name}_token_id"] for name in ("pad", "cls", "sep", "bos", "eos")] == [0, 1, 2, 1, 2]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3)
    assert model(**tokenizer(["the cat", "the"], padding=True, return_tensors="pt")).logits.shape == (2, 3)
    assert torch.equal(load_input_embedding(folder)[0], load_input_embedding(tmp_path / "run")[0])
