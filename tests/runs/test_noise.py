"""Noise beside mask tokens, end to end: one course on every mesh, and a resume is bitwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megahead.config.run import RunConfig
from megahead.distributed.group import Group
from megahead.distributed.launch import Launch
from megahead.report.read import read_metrics
from megahead.train.run import pretrain
from support.long import long
from support.on_ranks import on_ranks
from support.small_run import same_tensors, small_config, stage, write_text

MODEL = {"family": "bert", "num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": 63, "vocab_multiple": 64}
PLAIN = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "max_positions": 32}
NOISE = {"mask_share": 0.4, "random_share": 0.4, "noise_share": 0.1}


def config_of(folder: Path, masking: dict[str, Any], **changes: Any) -> RunConfig:
    fixed = {
        "model": MODEL | PLAIN,
        "masking": {"mask_token": 60, "cls_token": 61, "sep_token": 62} | masking,
        "optimizer.eps": 1e-4,
    }
    return small_config(folder, fixed | changes)


def run(group: Group, config: RunConfig, resume: str = "auto") -> str:
    return pretrain(config, Launch(), resume).ending


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(folder).training]


@pytest.mark.parametrize("meshes", [[(2, stage(1))], long([(2, stage(1)), (4, {"parallel.tensor": 2} | stage(3))])])
def test_every_mesh_reads_the_same_noise_and_a_resume_is_bitwise(
    tmp_path: Path, meshes: list[tuple[int, dict[str, Any]]]
) -> None:
    write_text(tmp_path)
    for name, masking in {"alone": NOISE, "masked": {}}.items():
        on_ranks(1, run, config_of(tmp_path, masking, output_dir=str(tmp_path / name)))
    assert losses(tmp_path / "alone")[0] != pytest.approx(losses(tmp_path / "masked")[0], rel=1e-4)
    for ranks, changes in meshes:
        there = tmp_path / f"on-{ranks}"
        on_ranks(ranks, run, config_of(tmp_path, NOISE, output_dir=str(there), **changes))
        assert losses(there) == pytest.approx(losses(tmp_path / "alone"), rel=1e-4)
    on_ranks(2, run, config_of(tmp_path, NOISE, **stage(1)), str(tmp_path / "on-2/checkpoints/step-00000003"))
    assert same_tensors(tmp_path / "run", tmp_path / "on-2")
