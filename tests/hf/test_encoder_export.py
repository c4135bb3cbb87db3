"""Encoders go out as BERT and DistilBERT, with any head they have, and come in again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch.nn import functional as F
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertModel,
    DistilBertConfig,
    DistilBertForMaskedLM,
    RobertaConfig,
    RobertaForMaskedLM,
    XLMRobertaConfig,
    XLMRobertaForMaskedLM,
)

from megahead.config.loading import config_from_checkpoint
from megahead.config.run import RunConfig
from megahead.data.loader import held_out_collator
from megahead.data.train_tokenizer import train_wordpiece
from megahead.errors import FieldError
from megahead.hf.encoders import BERT, DISTILBERT, ROBERTA, XLM_ROBERTA
from megahead.hf.export import ensure_hf_folder, export
from megahead.hf.families import Family
from megahead.hf.importing import from_hf, load_input_embedding
from megahead.hf.trained import TrainedModel
from megahead.hf.verify import _token_rows
from megahead.objectives.micro_batch import EvaluationRequest
from megahead.objectives.pretraining import weight_shapes
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


FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {"family": "bert"},
    "distilbert": {"family": "bert", "token_types": 0},
    "roberta": {"family": "roberta", "position_offset": 1},
    "xlm_roberta": {"family": "xlm_roberta", "position_offset": 1},
}


def encoder_config(objective: dict[str, Any] | None = None, family: str = "bert", **model: Any) -> RunConfig:
    return small_config(
        model={**FAMILIES[family], "max_positions": 40, "intermediate_size": 100, **model},
        data={"end_token": 2},
        masking={
            "mask_token": 3,
            "cls_token": 1,
            "sep_token": 2,
            "special_tokens": [model.get("position_offset", 1) - 1],
        },
        objective=objective or {},
    )


def write_tokenizer(path: Path, size: int = 61) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    train_wordpiece(["the cat sat on the mat and the dog saw the cat"] * 10, size).save(str(path))


@pytest.mark.parametrize(
    ("family", "rows"), [("distilbert", 61), ("bert", 61), ("bert", 256), ("roberta", 256), ("xlm_roberta", 61)]
)
@pytest.mark.parametrize(("head", "objective"), HEADS, ids=str)
def test_an_export_speaks_as_its_checkpoint(tmp_path: Path, head: str, objective, family: str, rows: int) -> None:
    config = encoder_config(objective, family, vocab_multiple=256)
    save_small(tmp_path / "run", config)
    folder = export(tmp_path / "run", tmp_path / "out", head, keep_padding=rows == 256).folder
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
    targets_NV = logits.flatten(0, 1)[batch.target_index_N]
    loss = F.cross_entropy(targets_NV, batch.target_ids_N, reduction="sum")
    assert loss.item() == pytest.approx(scores.loss, abs=1e-4 * scores.targets)


@pytest.mark.parametrize(
    ("family", "head", "dtype"),
    [
        *(("bert", head, dtype) for head in ("none", "pmi") for dtype in ("bfloat16", "float16")),
        ("xlm_roberta", "pmi", "bfloat16"),
    ],
)
def test_half_precision_passes_its_own_check(tmp_path: Path, family: str, head: str, dtype: str) -> None:
    save_small(tmp_path / "run", encoder_config(family=family), scale=0.05)
    report = export(tmp_path / "run", tmp_path / "out", head, dtype=dtype)
    assert report.parity.largest_error["float32"] < 0.5


@pytest.mark.parametrize(("family", "last_type"), [("bert", 1), ("roberta", 0)])
def test_the_tokenizer_frames_texts_with_the_ids_trained_on(tmp_path: Path, family: str, last_type: int) -> None:
    config = encoder_config(family=family)
    masking = {"mask_token": 4, "cls_token": 2, "sep_token": 3, "special_tokens": [0]}
    tree = config.model_dump(mode="json")
    config = RunConfig.model_validate({**tree, "masking": masking, "data": {**tree["data"], "end_token": 3}})
    save_small(tmp_path / "run", config)
    write_tokenizer(tmp_path / "run" / "tokenizer.json")
    folder = export(tmp_path / "run", tmp_path / "out", "pmi").folder
    tokenizer = AutoTokenizer.from_pretrained(folder)
    one, two = tokenizer("the cat")["input_ids"], tokenizer("the cat", "the dog")
    assert (one[0], one[-1]) == (2, 3)
    assert two["input_ids"].count(3) == 2
    assert max(two.get("token_type_ids", [0])) == last_type
    assert (tokenizer.mask_token_id, tokenizer.pad_token_id) == (4, 0)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3)
    assert model(**tokenizer(["the cat", "the"], padding=True, return_tensors="pt")).logits.shape == (2, 3)


TWO_LAYERS = {"num_hidden_layers": 2, "tie_word_embeddings": False}


@pytest.mark.parametrize(
    ("names", "family", "theirs"),
    [
        (BERT, "bert", lambda: BertForMaskedLM(BertConfig(**TWO_LAYERS))),
        (DISTILBERT, "distilbert", lambda: DistilBertForMaskedLM(DistilBertConfig(**TWO_LAYERS))),
        (ROBERTA, "roberta", lambda: RobertaForMaskedLM(RobertaConfig(**TWO_LAYERS))),
        (XLM_ROBERTA, "xlm_roberta", lambda: XLMRobertaForMaskedLM(XLMRobertaConfig(**TWO_LAYERS))),
    ],
)
def test_the_tables_are_bijections(names: Family, family: str, theirs) -> None:
    ours = list(weight_shapes(encoder_config({"name": "vanilla"}, family)))
    with torch.device("meta"):
        expected = {name for name, _ in theirs().named_parameters()} - {names.untied_bias_name}
    renamed = [names.names.to_hf(name) for name in ours]
    assert set(renamed) == expected
    assert [names.names.from_hf(name) for name in renamed if name] == [(name,) for name in ours]


def save_theirs(folder: Path, model: torch.nn.Module) -> Path:
    model.save_pretrained(folder)
    write_tokenizer(folder / "tokenizer.json")
    return folder


@pytest.mark.parametrize(("kind", "head"), [("masked", "trained"), ("backbone", "none"), ("distil", "trained")])
def test_there_and_back_is_bitwise(tmp_path: Path, kind: str, head: str) -> None:
    torch.manual_seed(0)
    shape = {"vocab_size": 61, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3}
    bert = BertConfig(**shape, intermediate_size=100, max_position_embeddings=64, layer_norm_eps=1e-6)
    distil = DistilBertConfig(vocab_size=61, dim=48, n_layers=2, n_heads=3, hidden_dim=100, max_position_embeddings=64)
    model = {
        "masked": lambda: BertForMaskedLM(bert),
        "backbone": lambda: BertModel(bert, add_pooling_layer=False),
        "distil": lambda: DistilBertForMaskedLM(distil),
    }[kind]()
    theirs = save_theirs(tmp_path / "theirs", model)
    back = export(from_hf(theirs, tmp_path / "run"), tmp_path / "back", head).folder
    before, after = (load_file(folder / "model.safetensors") for folder in (theirs, back))
    for name, tensor in after.items():
        assert torch.equal(tensor, before.pop(name)), name
    assert set(before) <= {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias", "vocab_projector.weight"}
    old, new = (json.loads((folder / "config.json").read_text()) for folder in (theirs, back))
    for key in ("architectures", "model_type", "layer_norm_eps", "n_layers", "num_hidden_layers", "vocab_size"):
        assert old.get(key) == new.get(key)


def test_pooler_and_next_sentence_head_are_left_out(tmp_path: Path) -> None:
    shape = {"vocab_size": 61, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3}
    theirs = save_theirs(tmp_path / "theirs", BertForPreTraining(BertConfig(**shape, intermediate_size=100)))
    assert TrainedModel.open(from_hf(theirs, tmp_path / "run")).config.objective.name == "vanilla"
    assert load_input_embedding(theirs)[0].shape == (61, 48)


def test_a_run_resolves_to_a_masked_language_model(tmp_path: Path) -> None:
    save_small(tmp_path / "run", encoder_config())
    folder = ensure_hf_folder(tmp_path / "run")
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["BertForMaskedLM"]
    assert "AutoModelForMaskedLM" in (folder / "README.md").read_text()


def test_padding_rows_are_kept_without_ever_winning(tmp_path: Path) -> None:
    save_small(tmp_path / "run", encoder_config())
    short, full = (
        export(tmp_path / "run", tmp_path / str(keep), "pmi", keep_padding=keep).folder for keep in (False, True)
    )
    ids = torch.arange(40)[None]
    with torch.no_grad():
        logits, padded = (AutoModelForMaskedLM.from_pretrained(folder)(ids).logits for folder in (short, full))
    assert (logits.shape[-1], padded.shape[-1]) == (61, 64)
    torch.testing.assert_close(padded.log_softmax(-1)[..., :61], logits.log_softmax(-1), rtol=1e-4, atol=1e-4)


def test_a_distilbert_of_an_earlier_version_with_another_eps_is_refused(tmp_path: Path) -> None:
    tree = encoder_config(family="distilbert").model_dump(mode="json")
    config = config_from_checkpoint({**tree, "model": {**tree["model"], "norm_eps": 1e-5}}, "")
    save_small(tmp_path / "run", config)
    with pytest.raises(FieldError, match=r"model\.norm_eps"):
        export(tmp_path / "run", tmp_path / "out", "none")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("padding", [0, 30, 60])
def test_a_roberta_is_compared_on_ids_around_its_padding(tmp_path: Path, padding: int) -> None:
    save_small(tmp_path / "run", encoder_config(family="roberta", position_offset=padding + 1))
    ids = set(_token_rows(TrainedModel.open(tmp_path / "run")).flatten().tolist())
    assert ids < {*range(61)} - {padding}
    assert min(ids) < 10
    assert max(ids) > 50


def test_the_extended_pythia_tokenizer_serves_an_encoder(tmp_path: Path, shared_data: Path) -> None:
    from megahead.data.train_tokenizer import add_encoder_tokens

    vocabulary = add_encoder_tokens(Tokenizer.from_file(str(shared_data / "tokenizers/20B_tokenizer.json")))
    config = encoder_config(hidden_size=6, vocab_size=50280, intermediate_size=8)
    tree = config.model_dump(mode="json")
    masking = {"mask_token": 50279, "cls_token": 50277, "sep_token": 50278}
    config = RunConfig.model_validate({**tree, "masking": masking, "data": {**tree["data"], "end_token": 0}})
    save_small(tmp_path / "run", config)
    vocabulary.save(str(tmp_path / "run" / "tokenizer.json"))
    tokenizer = AutoTokenizer.from_pretrained(export(tmp_path / "run", tmp_path / "out", "none").folder)
    ids = tokenizer("Hello [MASK]")["input_ids"]
    assert (ids[0], ids[-1]) == (50277, 50278)
    assert 50279 in ids
    assert tokenizer.pad_token_id == 1
