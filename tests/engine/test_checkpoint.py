"""Engine to disk to engine: another number of ranks and another stage, and an interrupted run that is not one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from megahead.checkpoints.format import Snapshot
from megahead.checkpoints.reading import open_checkpoint
from megahead.distributed.group import Group
from megahead.distributed.tensors import FullTensors
from megahead.engine.engine import Engine
from megahead.errors import CheckpointError
from support.forked import forked
from support.on_ranks import on_ranks
from support.saved import save_checkpoint
from support.small_engine import differing, small_batches, small_engine, whole


def train_and_save(group: Group, stage: int, root: str) -> dict[str, Tensor]:
    engine = small_engine(group, stage)
    steps(engine, group, range(2))
    state = {"optimizer_steps": engine.optimizer_steps}
    save_checkpoint(Path(root), 2, engine.tensors(), state=state, config={}, group=group)
    saved = whole(engine)
    steps(engine, group, range(2, 4))
    assert differing(saved, whole(engine))
    return whole(engine)


def resume(group: Group, stage: int, root: str, train: bool) -> dict[str, Tensor]:
    checkpoint = open_checkpoint(Path(root))
    engine = small_engine(group, stage)
    engine.load(checkpoint, checkpoint.state["optimizer_steps"])
    if train:
        steps(engine, group, range(2, 4))
    return whole(engine)


def steps(engine: Engine, group: Group, numbers: range) -> None:
    for step in numbers:
        engine.micro_step(small_batches([6], 1 / 6, seed=10 * step + group.rank)[0])
        engine.step(0.01)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_run_resumed_from_disk_ends_where_the_uninterrupted_one_does(stage: int, tmp_path: Path) -> None:
    uninterrupted = on_ranks(2, train_and_save, stage, str(tmp_path))
    for end, resumed in zip(uninterrupted, on_ranks(2, resume, stage, str(tmp_path), True), strict=True):
        assert differing(end, resumed) == []


def test_one_rank_without_zero_reads_what_four_ranks_at_stage_3_wrote(tmp_path: Path) -> None:
    on_ranks(4, train_and_save, 3, str(tmp_path))
    checkpoint = open_checkpoint(tmp_path)
    assert len(checkpoint.files) == 4
    (loaded,) = on_ranks(1, resume, 0, str(tmp_path), False)
    assert differing(loaded, {name: checkpoint.read(name) for name in checkpoint.names()}) == []


def load_of_another_size(group: Group, stage: int) -> str:
    engine = small_engine(group, stage)
    wrong = {name: torch.zeros(*tensor.shape, 2) for name, tensor in whole(engine).items()}
    with pytest.raises(CheckpointError) as error:
        engine.load(FullTensors(wrong.__getitem__), 1)
    return str(error.value)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_checkpoint_of_another_size_is_refused_in_one_sentence(stage: int) -> None:
    for sentence in on_ranks(2, load_of_another_size, stage):
        assert re.fullmatch(
            r"the checkpoint's weight/\S+ must have the model's shape \(.*\), but has \(.*, 2\) instead; "
            r"give `model` the sizes of that run\.",
            sentence,
        )


class OnNoDevice:
    """States that lie on a device from which nothing can be moved."""

    def get(self, parameter: nn.Parameter, kind: str) -> Tensor:
        return torch.empty(parameter.shape, device="meta")

    def set(self, parameter: nn.Parameter, kind: str, value: Tensor) -> None: ...


def share_of_a_rank_that_writes_nothing() -> tuple[int, int]:
    """Its tensors, and those of all ranks."""
    engine = small_engine(Group(), 0)
    engine._full_state._states = OnNoDevice()
    snapshot = Snapshot.take(engine.tensors(), Group(999, 1000))
    return len(snapshot.tensors), len(snapshot.entries)


def test_what_another_rank_writes_is_not_moved_to_the_host() -> None:
    mine, all_ranks = forked(share_of_a_rank_that_writes_nothing)
    assert (mine, all_ranks > 6) == (0, True)
