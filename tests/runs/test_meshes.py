"""Whole runs over tensor ranks: resumed on other meshes, started from checkpoints, each token counted once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megahead.checkpoints.reading import Checkpoint, open_checkpoint
from megahead.config.run import RunConfig
from megahead.distributed.group import Group, Mesh
from megahead.distributed.launch import Launch
from megahead.objectives.pretraining import build_parallel_model, load_weights_
from megahead.report.read import read_metrics
from megahead.train.run import pretrain
from megahead.train.start import starting_weights
from megahead.train.step import seed_step
from support.initialized import initialized
from support.long import long
from support.on_ranks import on_ranks
from support.small_engine import CPU
from support.small_run import small_config, stage, write_text


def run(group: Group, config: RunConfig, resume: str = "auto") -> str:
    return pretrain(config, Launch(), resume).ending


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(folder).training]


def meshed(zero: int, tensor: int) -> dict[str, Any]:
    return stage(zero) | {"parallel.tensor": tensor}


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run at ZeRO 2 on two tensor ranks, and of its text."""
    folder = tmp_path_factory.mktemp("two")
    write_text(folder)
    on_ranks(2, run, small_config(folder, meshed(2, 2)))
    return folder


@pytest.mark.parametrize(
    ("zero", "tensor", "ranks"), [(0, 1, 1), (3, 1, 2), long(1, 2, 4), long(3, 4, 4)], ids=lambda number: str(number)
)
def test_a_run_goes_on_over_another_mesh_and_stage(
    on_two_ranks: Path, tmp_path: Path, zero: int, tensor: int, ranks: int
) -> None:
    resumed = small_config(on_two_ranks, meshed(zero, tensor) | {"output_dir": str(tmp_path / "resumed")})
    on_ranks(ranks, run, resumed, str(on_two_ranks / "run/checkpoints/step-00000003"))
    assert losses(tmp_path / "resumed") == pytest.approx(losses(on_two_ranks / "run")[3:], abs=1e-5)


@pytest.mark.parametrize("zero", [0, long(3)])
def test_resume_over_tensor_and_data_ranks_is_bitwise_under_dropout(tmp_path: Path, zero: int) -> None:
    write_text(tmp_path)
    changes = meshed(zero, 2) | {"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1}
    on_ranks(4, run, small_config(tmp_path, changes))
    resumed = small_config(tmp_path, changes | {"output_dir": str(tmp_path / "resumed")})
    on_ranks(4, run, resumed, str(tmp_path / "run/checkpoints/step-00000003"))
    assert losses(tmp_path / "resumed") == losses(tmp_path / "run")[3:]
    ours, theirs = open_checkpoint(tmp_path / "resumed"), open_checkpoint(tmp_path / "run")
    assert list(ours.names()) == list(theirs.names())
    assert all(torch.equal(ours.read(name), theirs.read(name)) for name in ours.names())


def dropped(world: Group, config: RunConfig) -> list[Tensor]:
    """Hidden states of the same rows under dropout: at a step, at that step once more, and at the next."""
    mesh = Mesh.build(world, config.parallel.tensor)
    backbone = initialized(config, mesh.tensor_group).backbone
    ids = torch.arange(24).reshape(2, 12)
    states = []
    for first_sample in (0, 0, 8):
        seed_step(config.seed, first_sample, mesh.data_group.rank, torch.device("cpu"))
        states.append(backbone(ids).detach())
    return states


def test_dropout_is_alike_over_tensor_ranks_and_apart_over_data_ranks_and_steps(tmp_path: Path) -> None:
    changes = {"model.hidden_dropout": 0.3, "model.attention_dropout": 0.3, "parallel.tensor": 2}
    (a, again, later), a_too, (b, *_), b_too = on_ranks(4, dropped, small_config(tmp_path, changes))
    assert torch.equal(a, again)
    assert torch.equal(a, a_too[0])
    assert torch.equal(b, b_too[0])
    assert not torch.equal(a, b)
    assert not torch.equal(a, later)


def test_tokens_and_held_out_text_are_counted_once(tmp_path: Path) -> None:
    write_text(tmp_path)
    on_ranks(1, run, small_config(tmp_path, {"output_dir": str(tmp_path / "one")}))
    on_ranks(4, run, small_config(tmp_path, meshed(1, 2) | {"output_dir": str(tmp_path / "four")}))
    one, four = open_checkpoint(tmp_path / "one"), open_checkpoint(tmp_path / "four")
    assert [four.state[key] for key in ("tokens", "targets")] == [one.state[key] for key in ("tokens", "targets")]
    assert torch.equal(four.read("state/target_counts"), one.read("state/target_counts"))
    ours, theirs = (read_metrics(tmp_path / name).validation[-1] for name in ("four", "one"))
    assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
    assert ours["accuracy"] == theirs["accuracy"]


def started(world: Group, config: RunConfig) -> dict[str, bool]:
    """Which of this rank's parameters are its slice of what the checkpoint holds for them."""
    mesh = Mesh.build(world, config.parallel.tensor)
    assert config.init is not None
    module = build_parallel_model(config, mesh.tensor_group, CPU)
    load_weights_(module, mesh.tensor_group, starting_weights(config, world))
    checkpoint: Checkpoint = open_checkpoint(Path(config.init.from_checkpoint))
    source = {"head.weight": "backbone.embedding.weight"}
    outcome = {}
    for name, parameter in module.named_parameters():
        whole = checkpoint.read(f"weight/{source.get(name, name)}")
        dims = [dim for dim, size in enumerate(parameter.shape) if size != whole.shape[dim]]
        outcome[name] = torch.equal(parameter, mesh.tensor_group.shard(whole, dims[0]) if dims else whole)
    return outcome


def test_a_head_is_started_from_a_checkpoint_slice_by_slice(tmp_path: Path) -> None:
    write_text(tmp_path)
    on_ranks(1, run, small_config(tmp_path))
    init = {"from_checkpoint": str(tmp_path / "run"), "mode": "finetune"}
    changes = {"init": init, "objective.name": "vanilla", "parallel.tensor": 2}
    for outcome in on_ranks(2, started, small_config(tmp_path, changes)):
        assert "head.weight" in outcome
        assert all(outcome.values())
    wrong = small_config(tmp_path, changes | {"model.hidden_size": 64})
    with pytest.raises(AssertionError, match=r"CheckpointError.* of shape \(64, 64\), but has \(64, 32\)"):
        on_ranks(2, started, wrong)


def test_ranks_that_tensor_does_not_divide_are_refused(tmp_path: Path) -> None:
    write_text(tmp_path)
    with pytest.raises(AssertionError, match=r"`parallel\.tensor` must divide the number of ranks"):
        on_ranks(3, run, small_config(tmp_path, meshed(0, 2)))
