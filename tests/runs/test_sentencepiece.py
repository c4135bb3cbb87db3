"""A SentencePiece `.model` all the way: text, run, tasks, export, generation, another vocabulary."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
import sentencepiece
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from megahead.config.run import RunConfig
from megahead.data.preprocess import preprocess
from megahead.data.tokenizer import tokenizer_json
from megahead.data.vocabulary_map import ByteVocabulary
from megahead.distributed.group import Group
from megahead.distributed.launch import Launch
from megahead.errors import FieldError
from megahead.evaluate.harness import evaluate_tasks
from megahead.evaluate.harness_tasks import task_files
from megahead.evaluate.language_models import generate_continuation, pseudo_perplexity
from megahead.hf.export import ensure_hf_folder, export
from megahead.hf.importing import load_input_embedding
from megahead.hf.revocabulary import revocabulary
from megahead.report.read import read_metrics
from megahead.train.run import pretrain
from support.forked import run_script
from support.on_ranks import on_ranks
from support.sentencepiece_models import KINDS, sentencepiece_model
from support.small_run import small_config
from support.vocabularies import TEXT, vocabulary

TEXTS = [*TEXT, *("Съешь ещё этих\tмягких булок, ﬁn ½", "中文没有空格。日本語", "  हिन्दी  में\n\nx = 3  # ok ")] * 10
SIZE = 512


def texts_file(folder: Path) -> Path:
    path = folder / "text.jsonl"
    path.write_bytes(b"\n".join(orjson.dumps({"text": text}) for text in TEXTS))
    return path


def run(group: Group, config: RunConfig) -> str:
    return pretrain(config, Launch()).ending


def trained(folder: Path, model: Path, end: int, changes: dict[str, Any] | None = None) -> Path:
    """The folder of a run on the dataset FOLDER/text."""
    shape = {"model.vocab_size": SIZE, "model.max_positions": 64, "training.steps": 3, "training.evaluate_every": 3}
    named = {"data.tokenizer": str(model), "data.end_token": end}
    assert on_ranks(1, run, small_config(folder, shape | named | (changes or {}))) == ["finished"]
    return folder / "run"


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_trains_scores_exports_and_generates(tmp_path: Path, kind: str) -> None:
    text, model = texts_file(tmp_path), sentencepiece_model(tmp_path / "my.model", TEXTS, **KINDS[kind])
    library = sentencepiece.SentencePieceProcessor(model_file=str(model))
    end, named = library.eos_id(), None
    if kind == "no end":
        with pytest.raises(
            FieldError, match=r"`--end-token` must be a token of the tokenizer `.*my.model`, but is <\|e"
        ):
            preprocess([text], model, tmp_path / "text")
        end, named = library.unk_id(), "<unk>"
    preprocess([text], model, tmp_path / "text", end_token=named)
    tasks = {"names": ["bits_per_byte"], "data": str(tmp_path), "text": str(text), "every": 3}
    folder = trained(tmp_path, model, end, {"tasks": tasks, "training.remote_checkpoints": f"file://{tmp_path}/store"})
    assert (tmp_path / "store/tokenizer.model").read_bytes() == model.read_bytes()
    assert (folder / "tokenizer.model").read_bytes() == model.read_bytes()
    assert not (folder / "tokenizer.json").exists()
    exported = ensure_hf_folder(folder)
    assert (exported / "tokenizer.model").read_bytes() == model.read_bytes()
    theirs = AutoTokenizer.from_pretrained(exported)
    assert theirs(TEXTS)["input_ids"] == library.encode(TEXTS)
    padding = library.pad_id() if library.pad_id() >= 0 else end
    assert (theirs.eos_token_id, theirs.unk_token_id, theirs.pad_token_id) == (end, library.unk_id(), padding)
    assert theirs.decode(library.encode(TEXTS[0])) == library.decode(library.encode(TEXTS[0]))
    (later,) = evaluate_tasks(exported, task_files(["bits_per_byte"], tmp_path, text=text))
    logged = read_metrics(folder).tasks[-1]["tasks"]["bits_per_byte"]["bits_per_byte"]["value"]
    assert logged == pytest.approx(later.scores[0].value, rel=1e-6)
    said = run_script("tools/generate.py", "--model", folder, "--prompt", "the cat", "--max-tokens", 3)
    assert (said.returncode, said.stdout[:7]) == (0, "the cat")


def test_the_space_before_what_follows_a_prompt_is_kept(tmp_path: Path) -> None:
    path = sentencepiece_model(tmp_path / "my.model", TEXTS, **KINDS["llama"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer_json(path))
    more = tokenizer(" saw the", add_special_tokens=False)["input_ids"][1:]  # the first is the space of the prefix
    model = SimpleNamespace(
        device="cpu",
        config=SimpleNamespace(max_position_embeddings=64),
        generate=lambda ids, **_: torch.tensor([[*ids[0], *more]]),
    )
    assert generate_continuation(model, tokenizer, "the cat", 9, {}) == " saw the"


def test_a_model_that_no_export_could_hold_ends_the_run_before_its_first_step(tmp_path: Path) -> None:
    path = sentencepiece_model(tmp_path / "my.model", TEXTS, treat_whitespace_as_suffix=True)
    preprocess([texts_file(tmp_path)], path, tmp_path / "text")
    with pytest.raises(AssertionError, match=r"`.*my.model` must give the ids of a tokenizer.json that is made of it"):
        trained(tmp_path, path, 2)
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_a_run_of_before_whose_tokenizer_json_is_a_model_goes_on_and_exports(tmp_path: Path) -> None:
    model = sentencepiece_model(tmp_path / "my.model", TEXTS, **KINDS["llama"])
    preprocess([texts_file(tmp_path)], model, tmp_path / "text")
    folder = trained(tmp_path, model, 2)
    (folder / "tokenizer.model").rename(folder / "tokenizer.json")
    assert AutoTokenizer.from_pretrained(ensure_hf_folder(folder))(TEXTS)["input_ids"] == (
        sentencepiece.SentencePieceProcessor(model_file=str(model)).encode(TEXTS)
    )
    trained(tmp_path, model, 2, {"training.steps": 4})
    assert [path.name for path in folder.glob("tokenizer*")] == ["tokenizer.model"]


def test_an_encoder_masks_whole_words_of_a_model_and_scores_texts(tmp_path: Path) -> None:
    special = ["[CLS]", "[SEP]", "[MASK]"]
    model = sentencepiece_model(tmp_path / "my.model", TEXTS, control_symbols=special, **KINDS["nmt_nfkc"])
    library = sentencepiece.SentencePieceProcessor(model_file=str(model))
    cls, sep, mask = (library.piece_to_id(name) for name in special)
    preprocess([texts_file(tmp_path)], model, tmp_path / "text", end_token="[SEP]")
    masking = {"cls_token": cls, "sep_token": sep, "mask_token": mask, "strategy": "whole_word"}
    shape = {"family": "bert", "hidden_dropout": 0.0, "attention_dropout": 0.0}
    changes = {f"model.{name}": value for name, value in shape.items()} | {"masking": masking}
    exported = ensure_hf_folder(trained(tmp_path, model, sep, changes))
    theirs = AutoTokenizer.from_pretrained(exported)
    assert theirs("the cat")["input_ids"] == [cls, *library.encode("the cat"), sep]
    words = theirs("the cat saw the naïve mat", add_special_tokens=False)
    starts = [place for place, id_ in enumerate(words["input_ids"]) if library.id_to_piece(id_).startswith("▁")]
    assert [words.word_ids().index(word) for word in sorted(set(words.word_ids()))] == starts
    assert pseudo_perplexity(exported, TEXTS[:2])[0] == sum(map(len, library.encode(TEXTS[:2])))


@pytest.mark.parametrize("kind", ["llama", "nmt_nfkc"])
def test_a_model_takes_the_place_of_another_vocabulary_and_the_other_way_round(tmp_path: Path, kind: str) -> None:
    old = vocabulary(tmp_path, "bpe")
    model = sentencepiece_model(tmp_path / "my.model", TEXTS, eos_piece="<end>", **KINDS[kind])
    new = ByteVocabulary.open(model)
    preprocess([texts_file(tmp_path)], old.tokenizer.path, tmp_path / "text")
    before = trained(tmp_path, old.tokenizer.path, 0)
    revocabulary(before, model, tmp_path / "to")
    revocabulary(tmp_path / "to", old.tokenizer.path, tmp_path / "back")
    rows = {name: load_input_embedding(tmp_path / name)[0] for name in ("run", "to", "back")}
    for word in (" the", " cat"):
        was, now = old.token_bytes.index(word.encode()), new.token_bytes.index(word.encode())
        assert torch.equal(rows["to"][now], rows["run"][was])
        assert torch.equal(rows["back"][was], rows["run"][was])
    end = new.spellings.index("<end>")
    assert torch.equal(rows["to"][end], rows["run"][0])
    assert (tmp_path / "to/tokenizer.model").read_bytes() == model.read_bytes()
    assert (export(tmp_path / "to", tmp_path / "hf", "tied").folder / "tokenizer.model").is_file()
    assert (tmp_path / "back/tokenizer.json").read_bytes() == old.tokenizer.path.read_bytes()
