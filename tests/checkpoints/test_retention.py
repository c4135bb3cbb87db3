"""Which checkpoints a save looks at when it keeps the best."""

from __future__ import annotations

import errno
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megahead.checkpoints.store import RetentionRules
from megahead.distributed.group import Group
from support.named import steps_of_history, without_digits
from support.saved import save_checkpoint


def save(root: Path, step: int, validation: Any, rules: RetentionRules, keep: int = 1) -> Path:
    state = {} if validation is None else {"validation": validation}
    tensors = [("a", torch.ones(2))]
    return save_checkpoint(
        root, step, tensors, state=state, config={}, group=Group(), rules=replace(rules, newest=keep)
    )


def test_only_a_finite_loss_at_its_own_step_makes_one_of_the_best(tmp_path: Path) -> None:
    losses = {
        1: {"step": 1, "loss": 3.0},
        2: {"step": 1, "loss": 1.0},
        3: {"step": 3, "loss": -math.inf},
        4: {"step": 4},
        5: None,
        6: {"step": 6, "loss": 4.0},
        7: {"step": 7, "loss": 9.0},
    }
    for step, validation in losses.items():
        save(tmp_path, step, validation, RetentionRules(best=2))
    assert steps_of_history(tmp_path) == [1, 6, 7]


def test_losses_on_different_texts_do_not_compare(tmp_path: Path) -> None:
    for step, (data, loss) in enumerate([("a", 3.0), ("a", 2.0), ("b", 9.0), ("b", 8.0), ("b", 9.0), ("b", 9.0)], 1):
        save(tmp_path, step, {"step": step, "loss": loss, "data": data}, RetentionRules(best=1))
    assert steps_of_history(tmp_path) == [2, 4, 6]


def test_nothing_is_best_or_a_milestone_unless_asked_for(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, {"step": step, "loss": float(step)}, RetentionRules())
    assert steps_of_history(tmp_path) == [3]


def test_a_damaged_one_does_not_stand_in_the_way_of_looking_for_the_best(tmp_path: Path) -> None:
    first = save(tmp_path, 1, {"step": 1, "loss": 3.0}, RetentionRules(best=1), keep=3)
    save(tmp_path, 2, {"step": 2, "loss": 4.0}, RetentionRules(best=1), keep=3)
    (first / "checkpoint.json").write_text("{")
    save(tmp_path, 3, {"step": 3, "loss": 5.0}, RetentionRules(best=1), keep=1)
    assert steps_of_history(tmp_path) == [2, 3]


def test_what_another_process_still_reads_over_nfs_ends_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS renames an open file in place of removing it, and its folder stays until it is closed."""
    unlink, rename, is_open = os.unlink, os.rename, True

    def remove(path: str, *, dir_fd: int | None = None) -> None:
        if is_open and Path(path).name.startswith(".nfs"):
            raise OSError(errno.EBUSY, "Device or resource busy", path)
        if is_open and Path(path).suffix == ".safetensors":
            rename(path, ".nfs0001", src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        else:
            unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", remove)
    for step in (1, 2, 3):
        save(tmp_path, step, None, RetentionRules())
    assert steps_of_history(tmp_path) == [3]
    is_open = False
    save(tmp_path, 4, None, RetentionRules())
    left = sorted(without_digits(path.name) for path in tmp_path.iterdir())
    assert [name for name in left if "step-00000003" not in name] == ["latest", "step-00000004"]
