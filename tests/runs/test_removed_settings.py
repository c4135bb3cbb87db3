"""Runs of earlier versions with settings that were removed: switched off they go on, others are refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from megahead.checkpoints.format import Manifest
from megahead.config.loading import config_from_dict
from megahead.config.run import RunConfig
from megahead.distributed.group import Group
from megahead.distributed.launch import Launch
from megahead.errors import ConfigErrors
from megahead.hf.export import export
from megahead.hf.trained import TrainedModel
from megahead.train.run import pretrain
from support.on_ranks import on_ranks
from support.small_run import same_tensors, small_config, write_text

MODEL = {"family": "bert", "num_layers": 1, "hidden_size": 32, "num_heads": 4, "vocab_size": 63, "vocab_multiple": 64}
MASKING = {"mask_token": 60, "cls_token": 61, "sep_token": 62}
OFF = {"objective": {"nearest": 0}, "masking": {"similar_share": 0.0}, "data": {"nearest_ids": None}}
REMOVED = r"must be left out: hard negatives and similar words made models worse, and were removed, but is 2 instead; "


def as_before(tree: dict[str, Any], removed: dict[str, dict[str, Any]]) -> None:
    for section, settings in removed.items():
        tree[section] |= settings


def rewrite(folder: Path, removed: dict[str, dict[str, Any]]) -> None:
    """Its checkpoints as an earlier version wrote them."""
    for path in folder.glob("checkpoints/step-*"):
        manifest = Manifest.read(path)
        as_before(manifest.config, removed)
        manifest.state["texts"]["data.nearest_ids"] = None
        manifest.write(path)


def run(group: Group, config: RunConfig, resume: str = "auto") -> str:
    return pretrain(config, Launch(), resume).ending


def test_a_run_that_had_them_off_resumes_and_is_exported(tmp_path: Path) -> None:
    write_text(tmp_path)
    changes = {"model": MODEL | {"max_positions": 32}, "masking": MASKING, "training.steps": 4}
    whole = small_config(tmp_path, changes | {"output_dir": str(tmp_path / "whole")})
    on_ranks(1, run, whole)
    rewrite(tmp_path / "whole", OFF)
    old = small_config(tmp_path, changes).model_dump(mode="json")
    as_before(old, OFF)
    assert on_ranks(1, run, config_from_dict(old), str(tmp_path / "whole/checkpoints/step-00000003")) == ["finished"]
    assert same_tensors(tmp_path / "run", tmp_path / "whole")
    assert export(tmp_path / "whole", tmp_path / "out", "pmi").parity.compared == "logits"
    shutil.copytree(tmp_path / "whole", tmp_path / "other")
    rewrite(tmp_path / "other", {"objective": {"nearest": 2}})
    with pytest.raises(ConfigErrors, match=r"^the configuration in .* 1 mistake:\s+`objective\.nearest` " + REMOVED):
        TrainedModel.open(tmp_path / "other")


def test_all_that_are_not_off_are_refused_with_the_other_mistakes(tmp_path: Path) -> None:
    old = small_config(tmp_path, {"model": MODEL, "masking": MASKING}).model_dump(mode="json")
    as_before(old, {"objective": {"nearest": 2, "temperature": 0}, "masking": {"similar_share": 2}})
    with pytest.raises(ConfigErrors) as raised:
        config_from_dict(old)
    assert len(raised.value.problems) == 3
    assert "`objective.temperature` must be greater than 0, but is 0 instead." in raised.value.problems
    assert all(
        any(f"`{name}` must be left out" in each for each in raised.value.problems)
        for name in ("objective.nearest", "masking.similar_share")
    )
