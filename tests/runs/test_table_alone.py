"""`init.mode: table`: the embedding learns under a body that stays, bit by bit."""

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
from support.long import long_but
from support.on_ranks import on_ranks
from support.small_run import small_config, stage, write_text

EMBEDDING = "weight/backbone.embedding.weight"
MASKS = {
    "masking": {"mask_token": 57, "cls_token": 58, "sep_token": 59},
    "model.family": "bert",
    "model.max_positions": 32,
}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "ZeRO 2": (2, stage(2)),
    "ZeRO 3 in bf16": (2, stage(3) | {"engine.precision": "bf16"}),
    "tensor ranks, blocks computed again": (2, {"parallel.tensor": 2, "engine.activation_checkpointing": True}),
    "rows": (2, {"engine.embedding": "rows"}),
    "rows and tensor ranks, of which one has no gradients of its own": (
        2,
        {"engine.embedding": "rows", "parallel.tensor": 2, "engine.precision": "bf16"} | stage(1),
    ),
    "tied softmax": (1, {"objective.name": "vanilla", "objective.tied": True}),
}


def run(group: Group, config: RunConfig) -> str:
    return pretrain(config, Launch()).ending


def trained(folder: Path, shape: dict[str, Any]) -> Path:
    """The folder of a run of all weights, beside its text."""
    write_text(folder)
    on_ranks(1, run, small_config(folder, shape | {"training.steps": 30}))
    return folder / "run"


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("decoder"), {})


def moved(source: Path, folder: Path, ranks: int, changes: dict[str, Any]) -> tuple[list[str], float]:
    """Names of the weights that a run of the table alone changed, and by how much its loss fell."""
    init = {"init": {"from_checkpoint": str(source), "mode": "table"}, "output_dir": str(folder / "table")}
    config = small_config(source.parent, init | {"training.steps": 20, "seed": 7} | changes)
    assert on_ranks(ranks, run, config) == ["finished"] * ranks
    before, after = open_checkpoint(source), open_checkpoint(folder / "table")
    names = [name for name in before.names() if name.startswith("weight/")]
    assert {*names} <= {*after.names()}
    losses = [record["loss"] for record in read_metrics(folder / "table").training]
    return [name for name in names if not torch.equal(before.read(name), after.read(name))], losses[0] - losses[-1]


@pytest.mark.parametrize("case", long_but([case for case in CASES if case.startswith(("one", "rows and"))], CASES))
def test_the_table_alone_learns(decoder: Path, tmp_path: Path, case: str) -> None:
    ranks, changes = CASES[case]
    names, fallen = moved(decoder, tmp_path, ranks, changes)
    assert names == [EMBEDDING]
    assert fallen > 0


def test_so_does_an_encoders(tmp_path: Path) -> None:
    names, _ = moved(trained(tmp_path, MASKS), tmp_path, 1, MASKS)
    assert names == [EMBEDDING]
