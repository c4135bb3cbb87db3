"""Masking what the model misses: a run counts the same on every mesh, and goes on as it was after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megahead.checkpoints.reading import open_checkpoint
from megahead.config.run import RunConfig
from megahead.distributed.group import Group
from megahead.distributed.launch import Launch
from megahead.report.read import read_metrics
from megahead.train.run import pretrain
from support.long import long
from support.on_ranks import on_ranks
from support.small_run import small_config, stage, write_text

MODEL = {"family": "bert", "num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": 63}


def encoder(folder: Path, name: str, changes: dict[str, Any]) -> RunConfig:
    fixed = {
        "model": {**MODEL, "vocab_multiple": 64, "max_positions": 32, "hidden_dropout": 0.0, "attention_dropout": 0.0},
        "masking": {"mask_token": 60, "cls_token": 61, "sep_token": 62, "strategy": "hardest", "adapt_every": 2},
        "optimizer.eps": 1e-4,
        "training.steps": 9,
        "output_dir": str(folder / name),
    }
    return small_config(folder, fixed | changes)


def run(group: Group, config: RunConfig, resume: str = "auto") -> str:
    return pretrain(config, Launch(), resume).ending


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    write_text(folder)
    on_ranks(1, run, encoder(folder, "alone", {}))
    return folder / "alone"


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (2, stage(1)),
        long(4, stage(3) | {"parallel.tensor": 2, "data.prefetch": 0}),
        (2, {"parallel.tensor": 2, "engine.embedding": "rows"}),
    ],
    ids=str,
)
def test_every_mesh_counts_the_same_and_masks_the_same(
    tmp_path: Path, alone: Path, ranks: int, changes: dict[str, Any]
) -> None:
    write_text(tmp_path)
    on_ranks(ranks, run, encoder(tmp_path, "meshed", changes))
    one, two = open_checkpoint(alone), open_checkpoint(tmp_path / "meshed")
    assert one.read("state/difficulty").sum() > 0
    for name in ("state/difficulty", "state/target_counts"):
        assert torch.equal(one.read(name), two.read(name)), name
    losses = [[record["loss"] for record in read_metrics(run).training] for run in (alone, tmp_path / "meshed")]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resume_in_the_middle_of_a_period_goes_on_as_if_nothing_had_been(
    tmp_path: Path, alone: Path, ranks: int
) -> None:
    write_text(tmp_path)
    on_ranks(ranks, run, encoder(tmp_path, "resumed", {}), str(alone / "checkpoints/step-00000003"))
    one, two = open_checkpoint(alone), open_checkpoint(tmp_path / "resumed")
    assert torch.equal(one.read("state/difficulty"), two.read("state/difficulty"))
    if ranks == 1:
        assert all(torch.equal(one.read(name), two.read(name)) for name in one.names())


def test_other_tokens_are_masked_than_without_it(tmp_path: Path, alone: Path) -> None:
    write_text(tmp_path)
    on_ranks(1, run, encoder(tmp_path, "uniform", {"masking": {"mask_token": 60, "cls_token": 61, "sep_token": 62}}))
    plain = open_checkpoint(tmp_path / "uniform")
    assert "state/difficulty" not in plain.names()
    assert not torch.equal(plain.read("state/target_counts"), open_checkpoint(alone).read("state/target_counts"))


def test_a_run_that_masked_evenly_goes_on_with_what_it_misses_from_then_on(tmp_path: Path) -> None:
    write_text(tmp_path)
    masking = {"mask_token": 60, "cls_token": 61, "sep_token": 62}
    on_ranks(1, run, encoder(tmp_path, "run", {"masking": masking, "training.steps": 3}))
    allowed = {"resume.allow": ["masking", "training.steps"]}
    on_ranks(1, run, encoder(tmp_path, "run", allowed))
    resumed = open_checkpoint(tmp_path / "run")
    assert resumed.step == 9
    current, following, total = resumed.read("state/difficulty")
    assert 0 < current[:, 1].sum() <= following[:, 1].sum()
    assert total.sum() > 0
