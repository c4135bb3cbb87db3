"""A dataset brings its tokenizer, end token and number of ids: a config may leave them out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from megahead.commands.pretrain import describe
from megahead.config.loading import config_from_dict, load_config
from megahead.config.run import RunConfig
from megahead.data.indexed import IndexedDataset
from megahead.data.inspection import merge_datasets
from megahead.data.preprocess import preprocess
from megahead.data.tokenizer import load_tokenizer
from megahead.data.train_tokenizer import add_encoder_tokens, save_tokenizer, train_bpe, train_wordpiece
from megahead.distributed.group import Group
from megahead.distributed.launch import Launch
from megahead.errors import ConfigError, ConfigErrors, UserError
from megahead.evaluate.perplexity import evaluate_checkpoint
from megahead.hf.export import export
from megahead.remote_files import RemoteError
from megahead.train.run import pretrain
from support.on_ranks import on_ranks
from support.small_run import same_tensors, small_config

TEXTS = [
    f"the {word} sees the {other}, and goes away" for word in ("cat", "dog", "rat") for other in ("tea", "sun")
] * 40
FACTS = ("model.vocab_size", "data.end_token", "data.tokenizer")


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`by/`: tokenizers. `text/`: datasets of a decoder's and of an encoder's, and one of an earlier version."""
    folder = tmp_path_factory.mktemp("given")
    for name in ("by", "text", "other"):
        (folder / name).mkdir()
    save_tokenizer(train_bpe(TEXTS, 280), folder / "by/bpe.json")
    save_tokenizer(train_bpe(TEXTS, 270), folder / "by/small.json")
    pieces = add_encoder_tokens(train_wordpiece(TEXTS, 80))
    save_tokenizer(pieces, folder / "by/pieces.json")
    (folder / "text.jsonl").write_bytes(b"".join(orjson.dumps({"text": text}) + b"\n" for text in TEXTS))
    for name, cut_by in {
        "text/bpe": "bpe",
        "text/more": "bpe",
        "text/pieces": "pieces",
        "other/small": "small",
    }.items():
        preprocess(folder / "text.jsonl", folder / f"by/{cut_by}.json", folder / name, holdout=10)
    for part in (".bin", ".idx", ".json"):
        shutil.copy(folder / f"text/bpe{part}", folder / f"other/old{part}")
    described = json.loads((folder / "other/old.json").read_bytes())
    for field in ("tokenizer_file", "end_token"):
        del described[field]
    (folder / "other/old.json").write_text(json.dumps(described))
    return folder


def tree_of(train: Any, folder: Path, **changes: Any) -> dict[str, Any]:
    """A run's settings without what its dataset knows."""
    fixed = {
        "output_dir": str(folder / "run"),
        "data.train": train,
        "data.validation": f"{train}-validation" if isinstance(train, str) else None,
        "training.steps": 2,
        "training.checkpoint_every": 2,
        "training.evaluate_every": 2,
    }
    changes = fixed | {name.replace("__", "."): value for name, value in changes.items()}
    tree = small_config(folder, changes).model_dump(mode="json")
    for name in {*FACTS} - {*changes}:
        section, _, field = name.partition(".")
        del tree[section][field]
    return tree


def run(group: Group, config: RunConfig) -> str:
    try:
        return pretrain(config, Launch()).ending
    except UserError as error:
        return str(error)


def test_datasets_of_a_folder_share_one_file_of_their_tokenizer(given: Path) -> None:
    kept = sorted(path.name for path in (given / "text").glob("tokenizer-*"))
    assert len(kept) == 2  # of bpe, of which there are four datasets, and of pieces
    path = IndexedDataset(given / "text/more-validation").tokenizer_path()
    assert path is not None
    assert load_tokenizer(path).identity().sha256 == load_tokenizer(given / "by/bpe.json").identity().sha256
    preprocess(given / "text.jsonl", given / "by/bpe.json", given / "by/beside")
    assert IndexedDataset(given / "by/beside").tokenizer_path() == given / "by/bpe.json"
    assert not list((given / "by").glob("tokenizer-*"))


def test_a_run_that_leaves_them_out_is_the_run_that_gives_them(given: Path, tmp_path: Path) -> None:
    train = str(given / "text/bpe")
    full = {"model__vocab_size": 280, "data__end_token": 0, "data__tokenizer": str(given / "by/bpe.json")}
    spelled, silent = (
        config_from_dict(tree_of(train, tmp_path / name, **more))
        for name, more in {"spelled": full, "silent": {}}.items()
    )
    assert silent.model.padded_vocab_size() == 320
    for config in (spelled, silent):
        assert on_ranks(1, run, config) == ["finished"]
    assert same_tensors(tmp_path / "spelled/run", tmp_path / "silent/run")
    saved = yaml.safe_load((tmp_path / "silent/run/config.yaml").read_text())
    kept = IndexedDataset(train).tokenizer_path()
    assert saved["model"]["vocab_size"] == 280
    assert (saved["data"]["end_token"], saved["data"]["tokenizer"]) == (0, str(kept))
    assert load_config(tmp_path / "silent/run/config.yaml") == silent
    longer = config_from_dict(tree_of(train, tmp_path / "spelled", training__steps=4))
    assert on_ranks(1, run, longer) == ["finished"]  # goes on from the run that gave them
    folder = tmp_path / "silent/run"
    assert (folder / "tokenizer.json").read_bytes() == (given / "by/bpe.json").read_bytes()
    assert evaluate_checkpoint(folder, "pmi").perplexity > 1
    assert export(folder, tmp_path / "model", "pmi").tokenizer is not None


def test_a_dry_run_sees_them(given: Path, tmp_path: Path) -> None:
    config = config_from_dict(tree_of(str(given / "text/bpe"), tmp_path))
    text = describe(config, 1)
    assert "vocabulary 280 (table of 320)" in text
    assert "all 5 exist" in text  # the tokenizer's file among them


def test_an_encoder_takes_its_end_token(given: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(given / "by/pieces.json")
    cls, sep, mask = map(tokenizer.id_of, ("[CLS]", "[SEP]", "[MASK]"))
    encoder = {"model__family": "bert", "model__is_causal": False, "model__rotary_pct": 0.0}
    encoder |= {"model__parallel_residual": False, "model__activation": "gelu", "data__end_token": sep}
    tree = tree_of(
        str(given / "text/pieces"),
        tmp_path,
        **encoder,
        masking={"mask_token": mask, "cls_token": cls, "sep_token": sep},
        model__vocab_size=tokenizer.vocab_size,
    )
    del tree["data"]["end_token"], tree["model"]["vocab_size"]
    config = config_from_dict(tree)
    assert (config.data.end_token, config.model.vocab_size) == (sep, tokenizer.vocab_size)
    assert sep != 0
    assert on_ranks(1, run, config) == ["finished"]


def test_what_contradicts_the_dataset_is_refused(given: Path, tmp_path: Path) -> None:
    train = str(given / "text/bpe")
    (said,) = on_ranks(1, run, config_from_dict(tree_of(train, tmp_path, data__end_token=5)))
    assert said.startswith("`data.end_token` must be the id that closes documents of data.train (0), but is 5 instead;")
    (said,) = on_ranks(1, run, config_from_dict(tree_of(train, tmp_path, model__vocab_size=270)))
    assert said.startswith("`model.vocab_size` must be at least")
    another = str(given / "by/small.json")
    (said,) = on_ranks(1, run, config_from_dict(tree_of(train, tmp_path, data__tokenizer=another)))
    assert "must have one tokenizer" in said


def test_datasets_of_a_blend_must_agree(given: Path, tmp_path: Path) -> None:
    def blend(*names: str) -> dict[str, Any]:
        return tree_of([{"prefix": str(given / name)} for name in names], tmp_path)

    assert config_from_dict(blend("text/bpe", "text/more", "other/old")).model.vocab_size == 280
    with pytest.raises(ConfigError, match=r"one model\.vocab_size in all datasets, but is 280 in .* and 270 in "):
        config_from_dict(blend("text/bpe", "other/small"))


@pytest.mark.parametrize("moved", [True, False], ids=["with its tokenizer", "without it"])
def test_a_dataset_in_a_store_brings_them(
    given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copytree(given / "text", tmp_path / "store")
    for path in () if moved else (tmp_path / "store").glob("tokenizer-*"):
        path.unlink()
    url = f"file://{tmp_path}/store/bpe"
    config = config_from_dict(tree_of(url, tmp_path))
    assert (config.model.vocab_size, config.data.end_token) == (280, 0)
    kept = IndexedDataset(given / "text/bpe").tokenizer_path()
    assert kept is not None
    assert config.data.tokenizer == (f"file://{tmp_path}/store/{kept.name}" if moved else None)
    assert on_ranks(1, run, config) == ["finished"]
    assert (tmp_path / "run/tokenizer.json").exists() == moved


def test_a_dataset_of_an_earlier_version_is_read_as_before(given: Path, tmp_path: Path) -> None:
    tree = tree_of(str(given / "other/old"), tmp_path, data__validation=None, model__vocab_size=280)
    config = config_from_dict(tree)
    assert (config.data.end_token, config.data.tokenizer) == (0, None)
    assert on_ranks(1, run, config) == ["finished"]
    del tree["model"]["vocab_size"]
    assert config_from_dict(tree) == config
    tree["data"]["train"] = str(tmp_path / "nowhere")
    with pytest.raises(ConfigErrors, match=r"`model\.vocab_size` .* is missing, and there is no dataset \S*nowhere \("):
        config_from_dict(tree)
    for ending in (".idx", ".bin"):
        shutil.copy(given / f"text/bpe{ending}", tmp_path / f"nowhere{ending}")
    with pytest.raises(ConfigErrors, match=r"is missing, and \S*nowhere\.json does not say it \("):
        config_from_dict(tree)


def test_a_merge_keeps_what_its_parts_know(given: Path, tmp_path: Path) -> None:
    merged = merge_datasets([given / "text/pieces", given / "text/pieces-validation"], tmp_path / "merged")
    source = IndexedDataset(given / "text/pieces")
    assert merged.info is not None
    assert source.info is not None
    assert merged.info.end_token == source.info.end_token
    assert merged.tokenizer_path() == tmp_path / str(source.info.tokenizer_file)


def test_a_store_that_cannot_be_read_is_no_matter_where_it_need_not_be(tmp_path: Path) -> None:
    tree = tree_of("nowhere://bucket/text", tmp_path, data__validation=None, model__vocab_size=280)
    assert config_from_dict(tree).data.end_token == 0  # for a dry run elsewhere
    del tree["model"]["vocab_size"]
    with pytest.raises(RemoteError, match="nowhere"):
        config_from_dict(tree)
