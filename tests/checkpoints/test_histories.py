"""A run that goes back to an older checkpoint: what it turned away from is set aside, never counted, and not lost."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from megahead.checkpoints.disk import save_checkpoint
from megahead.checkpoints.folders import KEEP_NO_OTHERS, KeepRules, abandon_after, abandoned_in, step_of
from megahead.checkpoints.reading import newest_sound, open_checkpoint
from megahead.distributed.group import Group
from support.dying import die_at


def save(
    root: Path,
    step: int,
    keep: int = 2,
    parent_step: int | None = None,
    keep_rules: KeepRules = KEEP_NO_OTHERS,
    loss: float = 1.0,
) -> None:
    state = {"validation": {"step": step, "loss": loss}}
    tensors = {"weight": torch.full((5,), loss)}
    save_checkpoint(
        root,
        step,
        tensors.items(),
        state=state,
        config={},
        group=Group(),
        keep=keep,
        keep_rules=keep_rules,
        parent_step=parent_step,
    )


def damage(root: Path, step: int) -> None:
    (file,) = (root / f"step-{step:08d}").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def counted(root: Path) -> list[int]:
    return sorted(int(folder.name[5:]) for folder in root.glob("step-*"))


def aside(root: Path) -> list[str]:
    return [folder.name.removeprefix("abandoned-step-").lstrip("0") for folder in abandoned_in(root)]


def found(root: Path) -> int:
    checkpoint, _ = newest_sound(root)
    assert checkpoint is not None
    return checkpoint.step


def test_a_damaged_one_that_was_passed_over_does_not_cost_a_sound_one(tmp_path: Path) -> None:
    for step in (4, 8, 12):
        save(tmp_path, step)
    damage(tmp_path, 12)
    save(tmp_path, 10, parent_step=8)
    assert (counted(tmp_path), aside(tmp_path)) == ([8, 10], ["12"])
    assert found(tmp_path) == 10


def test_what_lies_between_an_older_one_and_the_next_save_belongs_to_neither(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        save(tmp_path, step, keep=4)
    save(tmp_path, 5, parent_step=2)
    assert (counted(tmp_path), aside(tmp_path)) == ([2, 5], ["4", "6", "8"])
    damage(tmp_path, 5)
    assert found(tmp_path) == 2


def test_one_that_goes_on_from_elsewhere_leaves_none_of_the_folders_own(tmp_path: Path) -> None:
    for step in (2, 8):
        save(tmp_path, step)
    save(tmp_path, 5, parent_step=-1)
    assert (counted(tmp_path), aside(tmp_path)) == ([5], ["2", "8"])


def test_one_abandoned_twice_is_kept_twice_and_can_be_opened_by_its_name(tmp_path: Path) -> None:
    save(tmp_path, 2)
    for loss in (3.0, 4.0):
        save(tmp_path, 8, parent_step=2, loss=loss)
        save(tmp_path, 4, parent_step=2)
    names = [folder.name for folder in abandoned_in(tmp_path)]
    assert names == ["abandoned-step-00000004", "abandoned-step-00000008", "abandoned-step-00000008-2"]
    assert [open_checkpoint(tmp_path / name).read("weight")[0] for name in names[1:]] == [3.0, 4.0]


def test_neither_milestones_nor_the_best_of_another_history_count(tmp_path: Path) -> None:
    keep_rules = KeepRules(every=4, best=1)
    for step, loss in ((2, 5.0), (4, 4.0), (6, 0.5), (8, 0.6)):
        save(tmp_path, step, keep=1, keep_rules=keep_rules, loss=loss)
    assert counted(tmp_path) == [4, 6, 8]
    for step, loss in ((5, 3.0), (7, 3.5)):
        save(tmp_path, step, keep=1, keep_rules=keep_rules, loss=loss, parent_step=4 if step == 5 else 5)
    assert (counted(tmp_path), aside(tmp_path)) == ([4, 5, 7], ["6", "8"])  # 4 a milestone, 5 the best of this history


def test_what_lies_above_a_step_is_not_looked_at_when_told_so(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        save(tmp_path, step, keep=9)
    damage(tmp_path, 6)
    for up_to, expected in ((5, 4), (4, 4), (3, 2), (1, None)):
        checkpoint, told = newest_sound(tmp_path, up_to=up_to)
        assert (None if checkpoint is None else checkpoint.step, told) == (expected, [])


OLD, NEW = 1.0, 2.0


@pytest.mark.parametrize(("parent_step", "step"), [(2, 5), (2, 6), (-1, 5), (-1, 6)])
def test_a_process_killed_anywhere_in_turning_away_leaves_one_history_and_no_mixture(
    parent_step: int, step: int, tmp_path: Path
) -> None:
    """Ends the process at its 1st, 2nd, ... durable act until one save gets through."""
    survived, newest = False, set()
    for old in (2, 4, 6, 8):
        save(tmp_path / "old", old, keep=9, loss=OLD)
    for point in range(100):
        root = shutil.copytree(tmp_path / "old", tmp_path / str(point))
        child = os.fork()
        if child == 0:
            die_at(point)
            save(root, step, keep=9, parent_step=parent_step, loss=NEW)
            os._exit(0)
        survived = os.waitpid(child, 0)[1] == 0
        checkpoint, _ = newest_sound(root)
        if checkpoint is None:  # went on from elsewhere, which is still to be named again
            assert (parent_step, aside(root)) == (-1, ["2", "4", "6", "8"])
            newest.add((0, OLD))
            continue
        history = loss_of(checkpoint.folder)
        newest.add((checkpoint.step, history))
        save(root, 9, keep=9, parent_step=checkpoint.step, loss=history)
        for folder in root.glob("step-*"):
            assert loss_of(folder) == history or step_of(folder) <= parent_step, (point, checkpoint.step, folder)
        if survived:
            break
    assert survived
    assert newest == {(8, OLD), (max(parent_step, 0), OLD), (step, NEW)}


def loss_of(folder: Path) -> float:
    return float(open_checkpoint(folder).read("weight")[0])


def test_a_parent_that_is_gone_is_not_what_latest_points_to(tmp_path: Path) -> None:
    save(tmp_path, 8)
    abandon_after(tmp_path / "step-00000006", 4)  # and the process dies here
    assert (tmp_path / "latest").read_text() == "step-00000008\n"
    assert aside(tmp_path) == ["8"]


def test_one_that_a_crash_left_without_its_name_has_it_again_after_the_next_save(tmp_path: Path) -> None:
    save(tmp_path, 4)
    (tmp_path / "step-00000004").rename(tmp_path / "step-00000004.replaced")
    save(tmp_path, 8)
    assert counted(tmp_path) == [4, 8]
