"""Rows that were saved stale are read as they would be now, and plain ones as if all had just been updated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megahead.checkpoints.reading import open_checkpoint
from megahead.config.training import OptimizerConfig
from megahead.distributed import tensors as blocks
from megahead.distributed.group import Group
from megahead.distributed.tensors import RoundRobinShard
from megahead.errors import CheckpointError
from megahead.sharded_embedding.optimizer import ROW_OPTIMIZERS
from support.on_ranks import on_ranks
from support.saved import save_checkpoint

ROWS, WIDTH, NAME = 37, 3, "embedding.weight"
CONFIG = OptimizerConfig(learning_rate=0.1)
WRITTEN = {"optimizer": CONFIG.model_dump(mode="json")}


def course() -> tuple[dict[str, Tensor], Tensor, Any]:
    """Rows, touched and the optimizer after 30 steps that updated some of them."""
    torch.manual_seed(0)
    row_optimizer = ROW_OPTIMIZERS["adamw"](CONFIG)
    rows = {
        "weight": torch.randn(ROWS, WIDTH),
        "exp_avg": torch.zeros(ROWS, WIDTH),
        "exp_avg_sq": torch.zeros(ROWS, WIDTH),
    }
    touched = torch.zeros(ROWS, dtype=torch.int32)
    for step in range(30):
        ids = torch.tensor([0, 1 + step % 7, 10 + step % 13])
        taken = {name: values[ids] for name, values in rows.items()}
        row_optimizer.apply_pending_updates_(taken, touched[ids])
        row_optimizer.step_(taken, torch.randn(3, WIDTH), 0.05)
        for name, values in rows.items():
            values[ids] = taken[name]
        touched[ids] = step + 1
    return rows, touched, row_optimizer


def save(group: Group, root: Path) -> None:
    rows, touched, row_optimizer = course()
    kept = {**rows, "touched": touched}
    tensors = {
        f"late/{kind}/{NAME}": RoundRobinShard(values[group.rank :: group.size], ROWS) for kind, values in kept.items()
    }
    tensors[f"late/rates/{NAME}"] = torch.from_numpy(row_optimizer.history.rates)
    save_checkpoint(root, 30, tensors.items(), state={"optimizer_steps": 30}, config=WRITTEN, group=group)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_late_rows_are_read_up_to_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    on_ranks(ranks, save, tmp_path)
    monkeypatch.setattr(blocks, "BLOCK_ROWS", 10)
    checkpoint, (rows, touched, row_optimizer) = open_checkpoint(tmp_path), course()
    assert len(checkpoint.files) == ranks
    read = [name for name in checkpoint.names() if not name.startswith("late/")]
    assert sorted(read) == sorted(f"{kind}/{NAME}" for kind in rows)
    for kind, values in rows.items():
        assert torch.equal(checkpoint.read(f"late/{kind}/{NAME}"), values)
    row_optimizer.apply_pending_updates_(rows, touched)
    for kind, values in rows.items():
        torch.testing.assert_close(checkpoint.read(f"{kind}/{NAME}"), values, rtol=0, atol=1e-7)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_any_rows_of_row_shards_are_found(tmp_path: Path, ranks: int) -> None:
    on_ranks(ranks, save, tmp_path)
    checkpoint, (rows, _, _) = open_checkpoint(tmp_path), course()
    for block in (range(37), range(1), range(5, 6), range(4, 29), range(36, 37), range(7, 7)):
        found = checkpoint.read_rows(f"late/weight/{NAME}", block)
        assert torch.equal(found, rows["weight"][block.start : block.stop])


def test_plain_rows_are_all_moved_at_the_last_step(tmp_path: Path) -> None:
    rows, _, _ = course()
    tensors = {f"{kind}/{NAME}": values for kind, values in rows.items()}
    state = {"optimizer_steps": 30}
    save_checkpoint(tmp_path, 30, tensors.items(), state=state, config=WRITTEN, group=Group())
    checkpoint = open_checkpoint(tmp_path)
    for kind, values in rows.items():
        assert torch.equal(checkpoint.read(f"late/{kind}/{NAME}"), values)
    assert checkpoint.read(f"late/touched/{NAME}").tolist() == [30] * ROWS
    rates = checkpoint.read(f"late/rates/{NAME}")
    assert rates.dtype == torch.float64
    assert rates.tolist() == [0.0] * 30
    for absent in (f"late/square_sum/{NAME}", "late/touched/another", "late/rates/another", f"touched/{NAME}"):
        with pytest.raises(CheckpointError, match=f"must hold the tensor {absent}, but does not"):
            checkpoint.read(absent)
