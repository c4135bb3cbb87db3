"""A run that could not use one of its settings at its end says so before its first step, and mostly in a dry run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest
import tokenizers
from pydantic import BaseModel

from megahead.commands.pretrain import describe
from megahead.config.run import RunConfig
from megahead.data.train_tokenizer import train_wordpiece
from megahead.distributed.group import Group
from megahead.distributed.launch import Launch
from megahead.errors import UserError
from megahead.train import boards
from megahead.train.run import pretrain
from support.on_ranks import on_ranks
from support.small_checkpoint import save_tokenizer
from support.small_run import small_config, write_text

DECODER = {"model.vocab_size": 300, "model.max_positions": 64, "data.tokenizer": "F/bpe.json"}
ENCODER: dict[str, Any] = {
    "model": {"family": "modernbert", "num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": 64}
    | {"intermediate_size": 64, "max_positions": 32, "local_window": 6},
    "data.tokenizer": "F/wordpiece.json",
    "masking": {"mask_token": 4, "cls_token": 2, "sep_token": 3},
}
LATER = {"objective.schedule": {"causal_share": 0.5}}
"""Masks from the second half on: what they are made by is read then."""


def tasks(**given: Any) -> dict[str, Any]:
    return DECODER | {"tasks": {"names": ["blimp"], "data": "F/tasks", "every": 6} | given}


def masks(field: str, value: Any, **more: Any) -> dict[str, Any]:
    return ENCODER | {"masking": ENCODER["masking"] | {field: value}} | more


When = Literal["read", "dry", "start"]
"""What refuses it first: the config as it is read, a dry run, or the run before its first step."""

ROWS: tuple[tuple[str, When, dict[str, Any], str], ...] = (
    ("name", "read", {"name": "a/b"}, "`name` must consist of letters"),
    ("output_dir", "read", {"output_dir": "s3://bucket/run"}, "`output_dir` must be a folder of a disk"),
    ("output_dir", "start", {"output_dir": "F/bpe.json"}, "F/bpe.json"),
    ("model.size", "read", {"model.size": "70q"}, "`model.size` must be"),
    ("data.train", "start", {"data.train": "F/none"}, "`F/none.idx` must exist"),
    ("data.train", "dry", {"model.vocab_size": 50}, "`model.vocab_size` must be at least that of data.train (60), but"),
    ("data.train.prefix", "start", {"data.train": [{"prefix": "F/none"}]}, "`F/none.idx` must exist"),
    ("data.validation", "start", {"data.validation": "F/none"}, "`F/none.idx` must exist"),
    ("data.tokenizer", "start", DECODER | {"data.tokenizer": "F/none.json"}, "`data.tokenizer` must name a readable"),
    ("data.tokenizer", "dry", DECODER | {"data.tokenizer": "F/garbage.json"}, "`F/garbage.json` must be a tokenizer."),
    ("data.tokenizer", "dry", DECODER | {"data.tokenizer": "F/tokenizer_config.json"}, "must be a tokenizer.json file"),
    ("data.tokenizer", "dry", DECODER | {"data.tokenizer": "F/empty.json"}, "`F/empty.json` must have tokens, but has"),
    (
        "data.tokenizer",
        "dry",
        DECODER | {"data.tokenizer": "F/garbage.model"},
        "must be a SentencePiece model, but can",
    ),
    ("data.tokenizer", "dry", DECODER | {"model.vocab_size": 200}, "`model.vocab_size` must be at least the number of"),
    ("data.tokenizer", "dry", masks("strategy", "whole_word") | {"data.tokenizer": "F/letters.json"}, "must spell tok"),
    ("data.end_token", "dry", DECODER | {"data.end_token": 290}, "`data.end_token` must be an id of data.tokenizer, "),
    (
        "masking.mask_token",
        "dry",
        masks("mask_token", 9),
        "`masking.mask_token` must be the id of [MASK] in data.token",
    ),
    (
        "masking.mask_token",
        "dry",
        masks("mask_token", 63),
        "`masking.mask_token` must be an id of data.tokenizer, whos",
    ),
    (
        "masking.cls_token",
        "dry",
        masks("cls_token", 1),
        "`masking.cls_token` must be the id of [CLS] in data.tokenizer",
    ),
    (
        "masking.sep_token",
        "dry",
        masks("sep_token", 1),
        "`masking.sep_token` must be the id of [SEP] in data.tokenizer",
    ),
    (
        "masking.cls_token",
        "dry",
        masks("cls_token", 1) | {"data.tokenizer": "F/roberta.json"},
        "`masking.cls_token` must be the id of <s> in data.tokenizer (0), but is 1, which is <pad> instead",
    ),
    (
        "masking.sep_token",
        "dry",
        masks("sep_token", 3) | {"data.tokenizer": "F/roberta.json"},
        "`masking.sep_token` must be the id of </s> in data.tokenizer (2), but is 3, which is <unk> instead",
    ),
    (
        "data.id_weights",
        "start",
        masks("strategy", "weights") | {"data.id_weights": "F/zero.npy"},
        "`data.id_weights` ",
    ),
    (
        "data.id_weights",
        "start",
        masks("strategy", "weights", **LATER) | {"data.id_weights": "F/zero.npy"},
        "numbers ab",
    ),
    (
        "masking.strategy",
        "dry",
        masks("strategy", "F/none.py:Mine"),
        "`masking.strategy` must name a class that can be",
    ),
    ("masking.strategy", "dry", masks("strategy", "json:Mine"), "`masking.strategy` must name a class that can be"),
    (
        "objective.custom.objective",
        "dry",
        DECODER | {"objective.custom": {"objective": "F/none.py:Mine"}},
        "`objective.custom.objective` must name a class that can be imported",
    ),
    (
        "objective.custom.objective",
        "dry",
        DECODER | {"objective.custom": {"objective": "json:JSONDecoder"}},
        "`objective.custom.objective` must name a subclass of megahead.objectives.auxiliary.Auxiliary",
    ),
    ("masking.strategy", "start", masks("strategy", "frequency", **LATER) | {"data.train": "F/bare"}, "token counts"),
    ("objective.group_samples", "read", {"objective.group_samples": "batch"}, "`objective.group_samples` must be"),
    ("engine.deepspeed", "dry", {"engine.deepspeed": "F/none.json"}, "`engine.deepspeed` must name a DeepSpeed JSON"),
    ("engine.deepspeed", "dry", {"engine.deepspeed": {"zero_optimisation": {}}}, "did you mean `engine.deepspeed.zero"),
    (
        "training.remote_checkpoints",
        "start",
        {"training.remote_checkpoints": "nothing://bucket/run"},
        "nothing://bucket/run",
    ),
    ("training.wandb", "start", {"training.wandb": "project"}, "`training.wandb` must be left out where wandb is not"),
    (
        "training.trackio",
        "start",
        {"training.trackio": "project"},
        "`training.trackio` must be left out where trackio is",
    ),
    ("training.mlflow", "start", {"training.mlflow": "project"}, "`training.mlflow` must be left out where mlflow is"),
    (
        "init.from_checkpoint",
        "start",
        {"init": {"from_checkpoint": "F/none", "mode": "continue"}},
        "`init.from_checkpo",
    ),
    (
        "init.from_hf",
        "start",
        {"init": {"from_hf": "F/none", "mode": "continue"}},
        "`init.from_hf` must be a Hugging F",
    ),
    ("resume.allow", "read", {"resume.allow": ["nothing"]}, "`resume.allow` must name settings"),
    ("tasks.names", "dry", tasks(names=["race!"]), "`tasks.names` must name tasks of"),
    ("tasks.names", "dry", tasks(names=["sciqq"]), "but is sciqq instead; did you mean `sciq`?"),
    ("tasks.data", "start", tasks(data="F/none"), "`F/none` must hold eval/blimp for task blimp"),
    ("tasks.data", "dry", tasks(names=["sciq"]), "`F/tasks` must hold eval/sciq/validation.jsonl for task sciq"),
    ("tasks.data", "dry", tasks(data=None), "`tasks.data` must name the folder"),
    ("tasks.cloze", "dry", tasks(names=["cloze"], cloze="F/garbage.json"), "`F/garbage.json`"),
    ("tasks.text", "dry", tasks(names=["bits_per_byte"], text="F/garbage.json"), "F/garbage.json"),
    ("tasks.items", "start", tasks(names=["next_item"], items="F/none"), "`F/none.idx` must exist"),
    (
        "tasks.articles",
        "start",
        tasks(names=["retrieval"], articles="F/none.jsonl") | ENCODER,
        "`F/none.jsonl` must be readable UTF-8 text",
    ),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts, tokenizers and tasks, right and wrong."""
    folder = tmp_path_factory.mktemp("given")
    write_text(folder, documents=20)
    for ending in (".bin", ".idx"):
        shutil.copyfile(folder / f"text{ending}", folder / f"bare{ending}")
    save_tokenizer(folder / "bpe.json")
    train_wordpiece(["the cat sat"] * 3, 60).save(str(folder / "wordpiece.json"))
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(folder / "empty.json"))
    letters = {name: id_ for id_, name in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"))}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token="[UNK]")).save(str(folder / "letters.json"))
    roberta = {name: id_ for id_, name in enumerate(("<s>", "<pad>", "</s>", "<unk>", "<mask>", "a"))}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(roberta, unk_token="<unk>")).save(str(folder / "roberta.json"))
    (folder / "garbage.json").write_text("not a tokenizer")
    (folder / "garbage.model").write_text("not a tokenizer")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    np.save(folder / "zero.npy", np.zeros(60))
    (folder / "tasks/eval/blimp").mkdir(parents=True)
    pair = {"sentence_good": "the cat sat", "sentence_bad": "the cat cat", "field": "syntax", "UID": "one"}
    (folder / "tasks/eval/blimp/one.jsonl").write_text(json.dumps(pair) + "\n")
    return folder


def placed(value: Any, folder: Path) -> Any:
    """Names in the folder instead of those that begin with F/."""
    return json.loads(json.dumps(value).replace('"F/', f'"{folder}/'))


def refused(action: Callable[[], Any]) -> str | None:
    try:
        action()
    except (UserError, OSError) as error:
        return str(error)
    return None


def begun(_group: Group, config: RunConfig) -> str | None:
    return refused(lambda: pretrain(config, Launch()))


@pytest.mark.parametrize(
    ("setting", "when", "changes", "says"), ROWS, ids=lambda part: part if isinstance(part, str) else ""
)
def test_what_a_run_could_not_use_is_refused_before_its_first_step(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    when: When,
    changes: dict[str, Any],
    says: str,
) -> None:
    monkeypatch.setattr(boards, "find_spec", lambda name: None)  # whatever is installed here
    given = {"output_dir": str(tmp_path / "run"), **placed(changes, folder)}
    if when == "read":
        sentence = refused(lambda: small_config(folder, given))
    else:
        config = small_config(folder, given)
        sentence = refused(lambda: describe(config, 1))
        assert (sentence is not None) == (when == "dry"), sentence
        (at_start,) = on_ranks(1, begun, config)
        assert when == "start" or at_start == sentence
        sentence = at_start
    assert sentence is not None
    assert says.replace("F/", f"{folder}/") in sentence
    assert len(sentence.splitlines()) == (2 if when == "read" else 1)  # that of a config begins with how many there are
    assert not list(tmp_path.rglob("metrics.jsonl"))


def test_right_settings_pass_a_dry_run_and_missing_files_are_named(folder: Path) -> None:
    for changes in (tasks(), ENCODER, masks("strategy", "whole_word")):
        assert "files       all " in describe(small_config(folder, placed(changes, folder)), 1)
    elsewhere = {"data.tokenizer": "F/elsewhere.json", "data.validation": None}
    config = small_config(folder, placed(tasks(data="F/none") | elsewhere, folder))
    assert f"missing: {folder}/elsewhere.json, {folder}/none" in describe(config, 1)


def test_a_special_token_may_be_another_than_the_one_that_is_spelled_as_usual(folder: Path, tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "wordpiece.json"))
    tokenizer.add_special_tokens(["<|mask|>"])
    tokenizer.save(str(tmp_path / "own.json"))
    own = {"data.tokenizer": str(tmp_path / "own.json"), "output_dir": str(tmp_path / "run")}
    masked = placed(masks("mask_token", tokenizer.token_to_id("<|mask|>")), folder) | own
    assert refused(lambda: describe(small_config(folder, masked), 1)) is None


def test_every_setting_that_is_a_text_is_in_the_table() -> None:
    """A new one may name a file, an address or a package: it belongs there."""
    assert set(settings_of_text(RunConfig)) <= {setting for setting, *_ in ROWS}


def settings_of_text(model: type[BaseModel], above: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        parts = list(parts_of(field.annotation))
        if str in parts:
            yield f"{above}{name}"
        for part in parts:
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from settings_of_text(part, f"{above}{name}.")


def parts_of(annotation: Any) -> Iterator[Any]:
    """The types that an annotation is made of; none of a Literal's."""
    yield annotation
    if get_origin(annotation) not in (Literal, dict):  # what is in a dict is read by a class of one's own
        for part in get_args(annotation):
            yield from parts_of(part)
