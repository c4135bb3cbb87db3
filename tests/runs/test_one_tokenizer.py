"""Texts, runs and exports know their tokenizer, and wherever two meet they must be one, in whatever bytes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import orjson
import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from megahead.commands.pretrain import describe
from megahead.data.indexed import IndexedDataset
from megahead.data.inspection import inspect_dataset, merge_datasets
from megahead.data.preprocess import preprocess
from megahead.data.tokenizer import Tokenizer, load_tokenizer
from megahead.data.train_tokenizer import save_tokenizer, train_bpe
from megahead.distributed.group import Group
from megahead.distributed.launch import Launch
from megahead.errors import CheckpointError, DataError, FieldError, UserError
from megahead.evaluate.perplexity import evaluate_checkpoint
from megahead.hf.export import export
from megahead.hf.loading import load_tokenizer_folder
from megahead.train.run import pretrain
from support.on_ranks import on_ranks
from support.small_run import small_config

TEXTS = [
    f"the {word} sees the {other}, and goes away" for word in ("cat", "dog", "rat") for other in ("tea", "sun")
] * 40


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tokenizers of one size, `ours` and `another`; datasets cut by them, and one that nobody knows."""
    folder = tmp_path_factory.mktemp("given")
    (folder / "by").mkdir()
    save_tokenizer(train_bpe(TEXTS, 280), folder / "by/ours.json")
    save_tokenizer(train_bpe([text[::-1] for text in TEXTS], 280), folder / "by/another.json")
    (folder / "text.jsonl").write_bytes(b"".join(orjson.dumps({"text": text}) + b"\n" for text in TEXTS))
    for name in ("ours", "another"):
        preprocess(folder / "text.jsonl", folder / f"by/{name}.json", folder / name)
    for part in (".bin", ".idx", ".json"):
        (folder / f"old{part}").write_bytes((folder / f"ours{part}").read_bytes())
    described = json.loads((folder / "old.json").read_bytes())
    (folder / "old.json").write_text(
        json.dumps({name: value for name, value in described.items() if not name.endswith("sha256")})
    )
    return folder


def config_of(given: Path, folder: Path, **changes: Any) -> Any:
    fixed = {
        "output_dir": str(folder / "run"),
        "model.vocab_size": 280,
        "data.train": str(given / "ours"),
        "data.validation": str(given / "ours"),
        "data.tokenizer": str(given / "by/ours.json"),
        "training.steps": 2,
        "training.checkpoint_every": 2,
        "training.evaluate_every": 2,
    }
    return small_config(folder, fixed | {name.replace("__", "."): value for name, value in changes.items()})


def run(group: Group, config: Any) -> str:
    try:
        return pretrain(config, Launch()).ending
    except UserError as error:
        return str(error)


def refused_dry(config: Any) -> str:
    with pytest.raises(UserError) as caught:
        describe(config, 2)
    return str(caught.value)


def saved_again(source: Path, folder: Path) -> Path:
    """The same tokenizer in other bytes, as transformers saves it, with truncation."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(source), eos_token="<|endoftext|>")
    tokenizer("the cat", truncation=True, max_length=1)
    tokenizer.save_pretrained(folder)
    assert (folder / "tokenizer.json").read_bytes() != source.read_bytes()
    return folder / "tokenizer.json"


def test_a_dataset_knows_what_cut_it(given: Path, tmp_path: Path) -> None:
    info = IndexedDataset(given / "ours").info
    assert info is not None
    assert info.tokenizer_identity() == load_tokenizer(given / "by/ours.json").identity()
    again = Tokenizer(saved_again(given / "by/ours.json", tmp_path)).identity()
    assert again.vocabulary == info.vocabulary_sha256
    assert again.sha256 != info.tokenizer_sha256
    assert load_tokenizer(given / "by/another.json").identity().vocabulary != again.vocabulary


@pytest.mark.parametrize(
    "changes",
    [
        {"data__tokenizer": "by/another.json"},
        {"data__validation": "another"},
        {"data__train": [{"prefix": "ours", "weight": 1}, {"prefix": "another", "weight": 1}]},
    ],
    ids=["tokenizer", "validation", "blend"],
)
def test_a_run_of_two_tokenizers_is_refused_before_it_begins(
    given: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    def placed(value: Any) -> Any:
        return (
            [each | {"prefix": placed(each["prefix"])} for each in value]
            if isinstance(value, list)
            else str(given / value)
        )

    config = config_of(given, tmp_path, **{name: placed(value) for name, value in changes.items()})
    sentences = [refused_dry(config), *on_ranks(2, run, config)]
    assert len(set(sentences)) == 1
    assert "must have one tokenizer, but they have ours.json (" in sentences[0]
    assert "and another.json (" in sentences[0]
    assert not (tmp_path / "run").exists()


def test_a_dry_run_passes_over_a_dataset_that_is_elsewhere(given: Path, tmp_path: Path) -> None:
    blend = [{"prefix": str(given / "nowhere")}, {"prefix": str(given / "ours")}]
    config = config_of(given, tmp_path, data__train=blend)
    assert f"missing: {given}/nowhere.bin, {given}/nowhere.idx" in describe(config, 1)
    config = config_of(given, tmp_path, data__train=blend, data__validation=str(given / "another"))
    assert "ours.json (" in refused_dry(config)
    elsewhere = {"data__tokenizer": str(tmp_path / "nowhere.json"), "data__train": str(given / "another")}
    config = config_of(given, tmp_path, **elsewhere, data__validation=None)
    assert f"missing: {tmp_path}/nowhere.json" in describe(config, 1)


def test_an_old_dataset_trains_and_is_named_once(
    given: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = config_of(given, tmp_path, data__train=str(given / "old"))
    assert on_ranks(1, run, config) == ["finished"]
    told = f"tokenizer   not compared with {given / 'old'}: what tokenized it is not recorded"
    assert capfd.readouterr().out.count(told) == 1


def test_a_run_goes_on_with_its_tokenizer_in_other_bytes_and_no_other(given: Path, tmp_path: Path) -> None:
    assert on_ranks(1, run, config_of(given, tmp_path)) == ["finished"]
    again = str(saved_again(given / "by/ours.json", tmp_path / "again"))
    assert on_ranks(1, run, config_of(given, tmp_path, training__steps=4, data__tokenizer=again)) == ["finished"]
    other = {
        "data__tokenizer": str(given / "by/another.json"),
        "data__train": str(given / "old"),
        "data__validation": None,
    }
    (sentence,) = on_ranks(1, run, config_of(given, tmp_path, training__steps=6, **other))
    assert "must be of the same run to resume, but differs in data.tokenizer (was vocabulary " in sentence
    assert "give a new run another `name` and `output_dir`" in sentence
    assert re.search("[0-9a-f]{16}", sentence.replace(str(tmp_path), "")) is None


def test_neither_an_export_nor_an_evaluation_takes_another_tokenizer(given: Path, tmp_path: Path) -> None:
    assert on_ranks(1, run, config_of(given, tmp_path)) == ["finished"]
    report = export(tmp_path / "run", tmp_path / "out", "pmi")
    assert report.tokenizer == tmp_path / "run/tokenizer.json"
    parity = json.loads((tmp_path / "out/parity.json").read_bytes())
    assert parity["tokenizer"] == f"vocabulary {load_tokenizer(given / 'by/ours.json').identity().vocabulary}"
    assert evaluate_checkpoint(tmp_path / "run", "pmi", dataset=str(given / "old")).loss > 0
    with pytest.raises(
        FieldError, match=r"`dataset` must be cut by the tokenizer .* but is .*, cut by another\.json \("
    ):
        evaluate_checkpoint(tmp_path / "run", "pmi", dataset=str(given / "another"))
    (tmp_path / "run/tokenizer.json").write_bytes((given / "by/another.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"tokenizer\.json` must be the tokenizer of the run, but is another one"):
        export(tmp_path / "run", tmp_path / "other", "pmi")
    assert not (tmp_path / "other").exists()


def test_datasets_of_two_tokenizers_are_not_merged(given: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"ours` and `.*another` must have one tokenizer, but they have ours\.json"):
        merge_datasets([given / "ours", given / "another"], tmp_path / "both")
    merged = merge_datasets([given / "ours", given / "ours"], tmp_path / "twice")
    assert merged.info is not None
    assert merged.info.tokenizer_identity() == load_tokenizer(given / "by/ours.json").identity()
    of_unknown = merge_datasets([given / "ours", given / "old"], tmp_path / "unknown")
    assert of_unknown.info is not None
    assert of_unknown.info.tokenizer_identity() is None


def test_an_inspection_by_another_tokenizer_warns(given: Path) -> None:
    inspection = inspect_dataset(given / "ours")
    assert inspection.warnings(0, load_tokenizer(given / "by/ours.json")) == []
    (warning,) = inspection.warnings(0, load_tokenizer(given / "by/another.json"))
    assert warning.startswith("the dataset was tokenized by ours.json (")
    assert dict(inspection.facts(0))["documents end in"] == "id 0 (100.0%)"


def test_a_tokenizers_dropout_is_not_applied(given: Path, tmp_path: Path) -> None:
    """Neither to datasets, nor where exports are read or written; its file's hash alone differs."""
    content = json.loads((given / "by/ours.json").read_bytes())
    content["model"]["dropout"] = 0.5
    (tmp_path / "dropout.json").write_text(json.dumps(content))
    assert len({tuple(tokenizers.Tokenizer.from_str(json.dumps(content)).encode(TEXTS[0]).ids) for _ in range(20)}) > 1
    report = preprocess(given / "text.jsonl", tmp_path / "dropout.json", tmp_path / "data")
    assert report.engine == "tokenizers, without its dropout of 0.5"
    for part in (".bin", ".idx"):
        assert (tmp_path / f"data{part}").read_bytes() == (given / f"ours{part}").read_bytes()
    config = config_of(given, tmp_path, data__tokenizer=str(tmp_path / "dropout.json"))
    assert on_ranks(1, run, config) == ["finished"]
    export(tmp_path / "run", tmp_path / "out", "none")
    assert json.loads((tmp_path / "out/tokenizer.json").read_bytes())["model"]["dropout"] is None
    (tmp_path / "out/tokenizer.json").write_text(json.dumps(content))
    folder = load_tokenizer_folder(tmp_path / "out")
    assert len({tuple(folder(TEXTS[0])["input_ids"]) for _ in range(20)}) == 1


def test_end_tokens_that_texts_spell_are_reported_or_refused(given: Path, tmp_path: Path) -> None:
    texts = ["the cat<|endoftext|>the dog", "the rat", "<|endoftext|><|endoftext|>"]
    (tmp_path / "text.jsonl").write_bytes(b"".join(orjson.dumps({"text": text}) + b"\n" for text in texts))
    report = preprocess(tmp_path / "text.jsonl", given / "by/ours.json", tmp_path / "data")
    assert (report.documents, report.end_inside) == (3, 3)
    before = (tmp_path / "data.bin").read_bytes()
    sentence = r"must not spell the end token <\|endoftext\|>, .* but do so at 3 places"
    with pytest.raises(DataError, match=sentence):
        preprocess(tmp_path / "text.jsonl", given / "by/ours.json", tmp_path / "data", end_inside="fail")
    assert (tmp_path / "data.bin").read_bytes() == before
    assert (
        preprocess(given / "text.jsonl", given / "by/ours.json", tmp_path / "other", end_inside="fail").end_inside == 0
    )
