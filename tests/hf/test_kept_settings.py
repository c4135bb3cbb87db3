"""A Hugging Face folder that goes in and out keeps everything that training did not change."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

from megahead.checkpoints.reading import open_checkpoint
from megahead.commands.convert import export_summary
from megahead.config.loading import config_from_checkpoint
from megahead.data.tokenizer import load_tokenizer
from megahead.distributed.group import Group
from megahead.distributed.launch import Launch
from megahead.errors import CheckpointError, UserError
from megahead.evaluate.language_models import Encoder
from megahead.hf.export import PARITY_FILE, ensure_hf_folder, export
from megahead.hf.importing import FAMILIES, from_hf
from megahead.hf.loading import load_tokenizer_folder
from megahead.hf.revocabulary import revocabulary
from megahead.run_folder import RunFolder
from megahead.train.run import pretrain
from support.forked import forked, run_script
from support.saved import save_checkpoint
from support.sentencepiece_models import KINDS, sentencepiece_model
from support.small_checkpoint import save_tokenizer
from support.small_run import small_config, write_text

IDS = 300
SHAPE: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
OWN: dict[str, dict[str, Any]] = {
    "gpt_neox": {**SHAPE, "hidden_act": "gelu_new", "use_cache": False},
    "llama": {**SHAPE, "num_key_value_heads": 2, "pretraining_tp": 1},
    "mistral": {**SHAPE, "num_key_value_heads": 2, "sliding_window": None},
    "qwen2": {**SHAPE, "num_key_value_heads": 2, "max_window_layers": 7},
    "qwen3": {**SHAPE, "num_key_value_heads": 2, "head_dim": 8},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "summary_type": "mean"},
    "gemma3_text": {**SHAPE, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8},
    "bert": {**SHAPE, "classifier_dropout": 0.2},
    "roberta": {**SHAPE, "type_vocab_size": 1, "classifier_dropout": 0.2, "max_position_embeddings": 64 + IDS - 1},
    "xlm-roberta": {**SHAPE, "type_vocab_size": 1, "layer_norm_eps": 1e-5, "max_position_embeddings": 64 + IDS - 1},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "qa_dropout": 0.3},
    "modernbert": {**SHAPE, "local_attention": 8, "classifier_pooling": "mean"},
    "modernbert-decoder": {**SHAPE, "local_attention": 8},
}
"""Settings of each family, some of which a run has no place for."""
ENCODERS = {kind for kind, family in FAMILIES.items() if family.head_type == "MaskedLM"}
BEGIN, END, PAD, MASK = IDS - 4, IDS - 3, IDS - 2, IDS - 1
DECODER_IDS = {"bos_token_id": BEGIN, "eos_token_id": [END, PAD], "pad_token_id": PAD}
ENCODER_IDS = {"bos_token_id": BEGIN, "eos_token_id": END, "cls_token_id": BEGIN, "sep_token_id": END}
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "mask_token": "<mask>"}
OURS = {"megahead"}


def theirs(folder: Path, kind: str, ids: dict[str, Any] | None = None, **names: str) -> Path:
    """A folder of a small model whose texts begin with <s> and, in encoders, end with </s>."""
    encoder = kind in ENCODERS
    save_tokenizer(folder / "bpe.json", "the cat")
    tokenizer = Tokenizer.from_file(str(folder / "bpe.json"))
    (folder / "bpe.json").unlink()
    fill = IDS - len(NAMES) - tokenizer.get_vocab_size()
    tokenizer.add_tokens([f"word{number}" for number in range(fill)])
    tokenizer.add_special_tokens([names.get(role, text) for role, text in NAMES.items()])
    closing = " </s>" if encoder else ""
    specials = [("<s>", BEGIN), ("</s>", END)]
    tokenizer.post_processor = TemplateProcessing(
        single=f"<s> $A{closing}", pair=f"<s> $A </s> $B{closing}", special_tokens=specials
    )
    said = {**NAMES, **({"cls_token": "<s>", "sep_token": "</s>"} if encoder or "decoder" in kind else {}), **names}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **said, padding_side="left", model_max_length=64)
    fast.chat_template = "{% for message in messages %}<s>{{ message['content'] }}</s>{% endfor %}"
    fast.save_pretrained(folder)
    if kind == "xlm-roberta":  # whose ids are those of tokenizer.json, one above those of this file
        (folder / "sentencepiece.bpe.model").write_bytes(b"pieces")
    ids = (ENCODER_IDS | {"pad_token_id": PAD} if encoder else DECODER_IDS) if ids is None else ids
    config = AutoConfig.for_model(kind, **{"vocab_size": IDS, "max_position_embeddings": 64, **OWN[kind], **ids})
    config.task_specific_params = {"summary": {"length": 3}}
    torch.manual_seed(0)
    model = (AutoModelForMaskedLM if encoder else AutoModelForCausalLM).from_config(config)
    if not encoder:
        model.generation_config = GenerationConfig(**ids, do_sample=True, temperature=0.6, top_p=0.9)
    model.save_pretrained(folder)
    return folder


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def kept(before: Path, after: Path, *, besides: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    """Fails unless all files are there, and say the same but for `besides` in config.json."""
    for path in before.iterdir():
        if path.suffix == ".safetensors":
            old, new = load_file(path), load_file(after / path.name)
            assert old.keys() == new.keys()
            assert all(torch.equal(old[name], new[name]) for name in old)
        elif path.name == "config.json":
            old, new = read(path), read(after / path.name)
            assert {key: new.get(key, "missing") for key in old if key not in besides} == {
                key: value for key, value in old.items() if key not in besides
            }
            assert new.keys() - old.keys() <= OURS | besides | {"tie_word_embeddings"}
        elif path.suffix == ".json":
            assert read(after / path.name) == read(path), path.name
        else:
            assert (after / path.name).read_bytes() == path.read_bytes(), path.name
    one, two = (AutoTokenizer.from_pretrained(folder) for folder in (before, after))
    for texts in (("the cat",), ("the cat", "sat")):
        assert one(*texts)["input_ids"] == two(*texts)["input_ids"]
    assert (one.padding_side, one.chat_template, one.special_tokens_map) == (
        two.padding_side,
        two.chat_template,
        two.special_tokens_map,
    )


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_folder_of_every_family_comes_out_as_it_went_in(tmp_path: Path, kind: str) -> None:
    before = theirs(tmp_path / "theirs", kind)
    after = export(from_hf(before, tmp_path / "run"), tmp_path / "back", "trained").folder
    if kind != "mistral":
        kept(before, after)
        return
    # goes out as a Llama; what only a Mistral has is left behind
    others = read(before / "config.json").keys() - {"bos_token_id", "eos_token_id", "pad_token_id"}
    kept(before, after, besides=others | read(after / "config.json").keys() - DECODER_IDS.keys())


@pytest.mark.parametrize("settings", [{}, {"add_bos_token": True, "add_eos_token": True}], ids=str)
def test_a_sentencepiece_model_alone_comes_out_with_a_tokenizer_json(tmp_path: Path, settings: dict[str, bool]) -> None:
    before = theirs(tmp_path / "theirs", "llama", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None})
    (before / "tokenizer.json").unlink()
    (before / "chat_template.jinja").unlink()
    (before / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer", **settings}))
    model = sentencepiece_model(before / "tokenizer.model", ["the cat sat on the mat"], IDS, **KINDS["llama"])
    run = from_hf(before, tmp_path / "run")
    after = ensure_hf_folder(run)
    kept(before, after)
    ids = load_tokenizer_folder(after)("the cat", add_special_tokens=False)["input_ids"]
    assert [ids] == load_tokenizer(model).encode_batch(["the cat"])
    written = (after / PARITY_FILE).stat().st_mtime_ns
    assert (ensure_hf_folder(run) / PARITY_FILE).stat().st_mtime_ns == written


@pytest.mark.parametrize(
    "ids",
    [
        {"bos_token_id": BEGIN, "eos_token_id": END, "pad_token_id": None},
        {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
        {"bos_token_id": 1, "eos_token_id": [5, 6, 7], "pad_token_id": 0},
    ],
    ids=str,
)
def test_ids_that_are_null_several_or_different_stay(tmp_path: Path, ids: dict[str, Any]) -> None:
    before = theirs(tmp_path / "theirs", "llama", ids)
    kept(before, export(from_hf(before, tmp_path / "run"), tmp_path / "back", "trained").folder)


def test_ids_of_an_encoder_that_nothing_names_are_given(tmp_path: Path) -> None:
    before = theirs(tmp_path / "theirs", "bert", {}, mask_token="<hidden>")
    settings = read(before / "tokenizer_config.json")
    named = {name: value for name, value in settings.items() if not name.endswith("_token") or name == "pad_token"}
    (before / "tokenizer_config.json").write_text(json.dumps(named))
    with pytest.raises(UserError, match=r"name an encoder's mask_token in tokenizer_config\.json.*--special-ids MASK"):
        from_hf(before, tmp_path / "run")
    command = ["tools/convert.py", "from-hf", "--model", before, "--output", tmp_path / "run"]
    done = run_script(*command, "--special-ids", MASK, BEGIN, END)
    assert done.returncode == 0, done.stderr
    masking = config_from_checkpoint(open_checkpoint(tmp_path / "run").config, "").masking
    assert masking is not None
    assert (masking.mask_token, masking.cls_token, masking.sep_token) == (MASK, BEGIN, END)
    kept(before, export(tmp_path / "run", tmp_path / "back", "trained").folder)


def trained(folder: Path, init: dict[str, Any], changes: dict[str, Any]) -> Path:
    """A run of one step from these weights."""
    write_text(folder)
    shape = {"family": "llama", "num_key_heads": 2, "intermediate_size": 48, "max_positions": 64, "norm_eps": 1e-6}
    model = {f"model.{name}": value for name, value in shape.items()} | {"model.vocab_size": IDS}
    model |= {"model.vocab_multiple": 1024}
    objective = {"objective": {"name": "vanilla", "tied": False}}
    tokenizer = {"data.tokenizer": str(folder / "theirs/tokenizer.json"), "data.end_token": END}
    more = {
        "init": {"mode": "continue", **init},
        "data.isolate_documents": False,
        "data.boundary_targets": True,
        "training.steps": 1,
        "schedule.warmup_steps": 0,
    }
    pretrain(small_config(folder, model | objective | tokenizer | more | changes), Launch())
    return folder / "run"


@pytest.mark.parametrize(
    ("source", "changes"), [("from_hf", {}), ("from_hf", {"data.tokenizer": None}), ("from_checkpoint", {})], ids=str
)
def test_a_run_that_begins_from_a_folder_keeps_its_settings(
    tmp_path: Path, source: str, changes: dict[str, Any]
) -> None:
    before = theirs(tmp_path / "theirs", "llama")
    places = {"from_hf": before, "from_checkpoint": from_hf(before, tmp_path / "imported")}
    run = forked(trained, tmp_path, {source: str(places[source])}, {"model.attention_dropout": 0.1} | changes)
    report = export(run, tmp_path / "back", "trained")
    after = report.folder
    assert report.tokenizer is not None
    for path in after.glob("*.safetensors"):
        path.write_bytes((before / path.name).read_bytes())  # which were trained
    kept(before, after, besides={"attention_dropout"})
    assert read(after / "config.json")["attention_dropout"] == 0.1


def with_config(run: Path, **sections: dict[str, Any]) -> None:
    """Saves a newer checkpoint with the same weights, of another config."""
    checkpoint = open_checkpoint(run)
    config = {**checkpoint.config, **{name: {**checkpoint.config[name], **new} for name, new in sections.items()}}
    tensors = [(name, checkpoint.read(name)) for name in checkpoint.names()]
    save_checkpoint(run / "checkpoints", 1, tensors, state=checkpoint.state, config=config, group=Group())


@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt_neox", "modernbert"])  # a Mistral goes out as a Llama
@pytest.mark.parametrize(
    ("changes", "exported"),
    [
        ({}, (131_072, 0.01)),
        ({"max_positions": 4096, "init_std": 0.03}, (4096, 0.03)),
        ({"size": "llama-1b", "max_positions": 8192}, (131_072, 0.01)),
    ],
)
def test_a_context_that_the_run_left_out_is_the_folders(
    tmp_path: Path, kind: str, changes: dict[str, Any], exported: tuple[int, float]
) -> None:
    before = theirs(tmp_path / "theirs", kind)
    published = {"max_position_embeddings": 131_072, "initializer_range": 0.01}
    (before / "config.json").write_text(json.dumps(read(before / "config.json") | published))
    run = from_hf(before, tmp_path / "run")
    default = 8192 if kind == "modernbert" else 2048
    with_config(run, model={"max_positions": default, "init_std": 0.02, **changes}, data={"sequence_length": 64})
    after = read(export(run, tmp_path / "back", "trained").folder / "config.json")
    assert tuple(after[name] for name in published) == exported


def test_rows_beyond_the_context_of_the_folder_lengthen_it(tmp_path: Path) -> None:
    run = from_hf(theirs(tmp_path / "theirs", "llama"), tmp_path / "run")
    with_config(run, model={"max_positions": 2048}, data={"sequence_length": 128})
    after = read(export(run, tmp_path / "back", "trained").folder / "config.json")
    assert after["max_position_embeddings"] == 2048


@pytest.mark.parametrize("way", ["end", "tokenizer", "revocabulary"])
def test_settings_of_another_end_or_vocabulary_are_not_kept(tmp_path: Path, way: str) -> None:
    """They would be wrong: special tokens are those of the run, as in runs that begin from no folder."""
    run = from_hf(theirs(tmp_path / "theirs", "llama"), tmp_path / "run")
    end = END
    if way == "end":
        end = 7
        with_config(run, data={"end_token": end})
    elif way == "tokenizer":
        content = read(run / "tokenizer.json")
        content["added_tokens"][-1]["content"] = "<other>"
        (run / "tokenizer.json").write_text(json.dumps(content))
    else:
        save_tokenizer(tmp_path / "other.json")
        run, end = revocabulary(run, tmp_path / "other.json", tmp_path / "moved").folder, 0
    report = export(run, tmp_path / "back", "trained")
    after, why = report.folder, {"end": "ends texts with another token", "tokenizer": "has another tokenizer"}
    if way == "revocabulary":  # it keeps none
        assert report.settings_conflict is None
    else:
        assert f"left out, since the run {why[way]}" in export_summary(report)
    ids = {name: id_ for name, id_ in read(after / "config.json").items() if name.endswith("_token_id")}
    assert ids == {"bos_token_id": end, "eos_token_id": end, "pad_token_id": 1}
    assert not (after / "chat_template.jinja").exists()


@pytest.mark.parametrize(("kind", "closing"), [("modernbert", []), ("modernbert-decoder", [END])])
def test_a_run_in_the_other_direction_frames_texts_as_it_read_them(
    tmp_path: Path, kind: str, closing: list[int]
) -> None:
    run = from_hf(theirs(tmp_path / "theirs", kind, ENCODER_IDS | {"pad_token_id": PAD}), tmp_path / "run")
    checkpoint = open_checkpoint(run)
    config = {**checkpoint.config, "model": {**checkpoint.config["model"], "is_causal": kind == "modernbert"}}
    tensors = [(name, checkpoint.read(name)) for name in checkpoint.names()]
    save_checkpoint(run / "checkpoints", 1, tensors, state=checkpoint.state, config=config, group=Group())
    after = load_tokenizer_folder(export(run, tmp_path / "back", "trained").folder)
    cat = after("cat", add_special_tokens=False)["input_ids"]
    assert after("cat")["input_ids"] == [BEGIN, *cat, *closing]


def without_config(content: bytes) -> bytes:
    """A whole archive whose config.json is empty."""
    buffer = BytesIO()
    with ZipFile(BytesIO(content)) as before, ZipFile(buffer, "w") as after:
        for name in before.namelist():
            after.writestr(name, b"" if name == "config.json" else before.read(name))
    return buffer.getvalue()


def with_file(name: str, content: bytes) -> bytes:
    """The archive with one more file."""
    buffer = BytesIO(content)
    with ZipFile(buffer, "a") as archive:
        archive.writestr(name, b"text")
    return buffer.getvalue()


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:-30],
        lambda content: b"no zip",
        without_config,
        partial(with_file, "../elsewhere"),
        partial(with_file, "a/../../elsewhere"),
        partial(with_file, "/tmp/elsewhere"),
    ],
)
def test_kept_settings_that_are_damaged_are_named(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    run = from_hf(theirs(tmp_path / "theirs", "llama"), tmp_path / "run")
    kept_there = RunFolder(run).source_hf_files
    kept_there.write_bytes(damage(kept_there.read_bytes()))
    with pytest.raises(CheckpointError, match=r"published\.zip` must be a zip archive of settings, .*; remove it to"):
        export(run, tmp_path / "back", "trained")
    kept_there.unlink()
    export(run, tmp_path / "back", "trained")


@pytest.mark.parametrize("named", ["config.json", "tokenizer_config.json"])
def test_an_encoder_without_cls_and_sep_begins_and_ends_rows_with_bos_and_eos(tmp_path: Path, named: str) -> None:
    before = theirs(
        tmp_path / "theirs",
        "modernbert",
        {"bos_token_id": BEGIN, "eos_token_id": END, "mask_token_id": MASK, "pad_token_id": PAD},
    )
    settings = read(before / "tokenizer_config.json")
    unnamed = {"cls_token", "sep_token"} | (NAMES.keys() if named == "config.json" else set())
    kept_names = {name: value for name, value in settings.items() if name not in unnamed}
    (before / "tokenizer_config.json").write_text(json.dumps(kept_names))
    content = {
        name: id_ for name, id_ in read(before / "config.json").items() if name not in ("cls_token_id", "sep_token_id")
    }
    (before / "config.json").write_text(json.dumps(content))
    after = export(from_hf(before, tmp_path / "run"), tmp_path / "back", "trained").folder
    kept(before, after)
    row = Encoder(after).masked_rows(["cat"], whole_words=False)[0][0]
    assert (row.ids[0], row.ids[1], row.ids[-1]) == (BEGIN, MASK, END)
