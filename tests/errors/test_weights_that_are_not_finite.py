"""Weights with NaN or an infinity are refused wherever they come in, before anything is written or trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megahead.checkpoints.reading import open_checkpoint
from megahead.distributed.group import Group
from megahead.errors import CheckpointError
from megahead.hf.export import ensure_hf_folder, export
from megahead.hf.importing import from_hf, load_input_embedding
from megahead.hf.loading import load_causal
from megahead.hf.revocabulary import revocabulary
from megahead.integrations.transformers import Headless
from megahead.objectives.pretraining import weight_shapes
from megahead.train.start import starting_weights
from support.headless_models import build
from support.saved import save_checkpoint
from support.small_checkpoint import save_small, save_tokenizer, small_config

TABLE = "backbone.embedding.weight"
CONFIG = small_config(model={"family": "llama", "vocab_size": 300})


def spoiled_folder(folder: Path) -> Path:
    """A Hugging Face folder, three of whose numbers are none."""
    save_small(folder / "sound", CONFIG)
    save_tokenizer(folder / "sound" / "tokenizer.json")
    hf = export(folder / "sound", folder / "hf", "tied").folder
    tensors = load_file(hf / "model.safetensors")
    tensors["model.embed_tokens.weight"][1, 2:4] = torch.nan
    tensors["model.embed_tokens.weight"][-1, 5] = torch.inf
    save_file(tensors, hf / "model.safetensors", metadata={"format": "pt"})
    return hf


def spoiled_run(folder: Path) -> Path:
    """A checkpoint, as somebody else may have written it, with the same."""
    sound = open_checkpoint(save_small(folder / "sound", CONFIG))
    tensors = {name: sound.read(name) for name in sound.names()}
    tensors[f"weight/{TABLE}"][1, 2:4] = torch.nan
    tensors[f"weight/{TABLE}"][299, 5] = -torch.inf
    run = folder / "run"
    config = CONFIG.model_dump(mode="json")
    save_checkpoint(run / "checkpoints", 3, tensors.items(), state=sound.state, config=config, group=Group())
    save_tokenizer(run / "tokenizer.json")
    return run


def new_vocabulary(model: Path) -> None:
    save_tokenizer(model.parent / "other.json", "a dog and a rat met the bird at sea")
    revocabulary(model, model.parent / "other.json", model.parent / "out")


def begin(model: Path, **init: Any) -> None:
    config = small_config(
        model={"family": "llama", "vocab_size": 300}, init={"mode": "continue", **{k: str(model) for k in init}}
    )
    read_all(starting_weights(config, Group()))


def read_all(tensors: Any) -> None:
    for name in weight_shapes(CONFIG):
        list(tensors.blocks(name))


FOLDER_DOORS: dict[str, Callable[[Path], object]] = {
    "from-hf": lambda hf: from_hf(hf, hf.parent / "out"),
    "init.from_hf": lambda hf: begin(hf, from_hf=True),
    "revocabulary": new_vocabulary,
    "input_embedding": load_input_embedding,
    "load_causal": load_causal,
}
RUN_DOORS: dict[str, Callable[[Path], object]] = {
    "to-hf": lambda run: export(run, run.parent / "out", "tied"),
    "init.from_checkpoint": lambda run: begin(run, from_checkpoint=True),
    "resume": lambda run: read_all(starting_weights(CONFIG, Group(), open_checkpoint(run))),
    "revocabulary": new_vocabulary,
    "input_embedding": load_input_embedding,
    "evaluate": ensure_hf_folder,
}


@pytest.mark.parametrize("door", FOLDER_DOORS)
def test_a_folder_with_weights_that_are_not_finite_is_refused(tmp_path: Path, door: str) -> None:
    hf = spoiled_folder(tmp_path)
    with pytest.raises(CheckpointError, match=r"hf.*must hold finite numbers only, but 3 of (model\.)?embed_tokens"):
        FOLDER_DOORS[door](hf)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("door", RUN_DOORS)
def test_a_checkpoint_with_weights_that_are_not_finite_is_refused(tmp_path: Path, door: str) -> None:
    run = spoiled_run(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"step-00000003-\w+` must hold finite numbers only, but 3 of .*backbone\.emb"
    ):
        RUN_DOORS[door](run)
    assert not (tmp_path / "out").exists()
    assert not list(run.glob("exports/*"))


def test_a_model_of_transformers_with_weights_that_are_not_finite_is_refused(tmp_path: Path) -> None:
    model = build("llama")
    headless = Headless(model)
    model.get_input_embeddings().weight.data[3, 0] = torch.nan
    sentence = r"`model` must hold finite numbers only, but 1 of embed_tokens.weight is NaN"
    with pytest.raises(CheckpointError, match=sentence):
        Headless(model)
    with pytest.raises(CheckpointError, match=sentence):
        headless.save(tmp_path / "out", "none")
    assert not (tmp_path / "out").exists()
